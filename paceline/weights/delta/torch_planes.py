"""The planes of a delta from torch operations alone, for weights that live on a GPU.

Yields what `planes.planes_of` yields, number for number; only planes, about as long as the changes are many, have to
cross to the CPU, where the entropy coder is the same. The choice of classes is made on the CPU from three histograms.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.weights.delta import classes
from paceline.weights.delta.number_line import NumberLine, line_of
from paceline.weights.delta.planes import Level, Planes

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_planes(base: torch.Tensor, target: torch.Tensor, level: Level) -> Planes:
    """Compare two dense tensors of one type, shape and device, fewer than 2^32 elements; returns planes on the CPU."""
    line = line_of(base.dtype)
    old, new = _signed_bits(base, line), _signed_bits(target, line)
    positions = torch.nonzero(old != new).squeeze(-1)
    distances = _distances(old[positions], new[positions], line)
    edges = _edges(old, positions, distances, line) if level == "small" and len(positions) else ()
    bounds = torch.tensor(edges, dtype=torch.int64, device=old.device)
    totals: list[int] = []
    counts: list[int] = []
    gaps: list[torch.Tensor] = []
    moves: list[torch.Tensor] = []
    owners = torch.bucketize(_exponents(old, line), bounds, right=True) if edges else torch.zeros_like(old)
    for k in range(len(edges) + 1):
        own = owners == k
        ranks = torch.cumsum(own, 0)
        mine = own[positions]
        place = ranks[positions[mine]]
        totals.append(int(ranks[-1]) if len(ranks) else 0)
        counts.append(len(place))
        gaps.append(torch.diff(place, prepend=place.new_zeros(1)) - 1)
        moves.append(distances[mine])
    signed = torch.cat(moves).cpu().numpy()
    return Planes(
        edges,
        np.array(totals, np.int64),
        np.array(counts, np.int64),
        torch.cat(gaps).cpu().numpy().astype(np.uint32),
        signed.view(line.unsigned),
    )


def _signed_bits(tensor: torch.Tensor, line: NumberLine) -> torch.Tensor:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(_SIGNED[line.width])


def _distances(old: torch.Tensor, new: torch.Tensor, line: NumberLine) -> torch.Tensor:
    """Zigzag distances; a shift of signed integers to the right spreads the sign bit, sums wrap."""
    top = 8 * line.width - 1
    moved = (new ^ ((new >> top) & line.fold)) - (old ^ ((old >> top) & line.fold))
    return (moved << 1) ^ (moved >> top)


def _exponents(bits: torch.Tensor, line: NumberLine) -> torch.Tensor:
    magnitude = (1 << (8 * line.width - 1)) - 1
    return ((bits & magnitude) >> (line.mantissa or 0)).to(torch.int64)


def _edges(old: torch.Tensor, positions: torch.Tensor, distances: torch.Tensor, line: NumberLine) -> tuple[int, ...]:
    if line.mantissa is None:
        return ()
    sample = _exponents(old[:: classes.SAMPLE_STEP], line)
    at = _exponents(old[positions], line)
    size = classes.EXPONENTS
    lengths = torch.zeros(size, dtype=torch.int64, device=old.device)
    lengths.index_add_(0, at, _bit_lengths(distances, line))
    found = classes.merge_exponents(
        torch.stack([torch.bincount(sample, minlength=size), torch.bincount(at, minlength=size), lengths])
        .cpu()
        .numpy(),
        classes.SAMPLE_STEP,
        classes.MAX_CLASSES,
    )
    return tuple(int(edge) for edge in found)


def _bit_lengths(distances: torch.Tensor, line: NumberLine) -> torch.Tensor:
    """How many bits each unsigned number has; the top bit of a signed integer makes it the full width."""
    total = torch.zeros_like(distances, dtype=torch.int64)
    for bit in range(8 * line.width - 1):
        total += (distances >> bit) > 0
    return torch.where(distances < 0, 8 * line.width, total)
