"""The weights that are moved: finite random bfloat16 of the model's shapes, marked with the version they stand for.

The mark is what every receiver of a peer is checked by, outside the measured time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.cli.sync_bench.model_shapes import EMBEDDING, HEAD, ModelShapes
from paceline.core.errors import SyncError

_BLOCK_ELEMENTS = 1 << 22
_LARGEST_MARK = 10_000  # as int16 bits: a small finite bfloat16


def make_weights(shapes: ModelShapes, seed: int) -> dict[str, torch.Tensor]:
    """Every stored tensor by name, standard deviation 0.02, all pages touched."""
    generator = torch.Generator().manual_seed(seed)
    block = (torch.randn(_BLOCK_ELEMENTS, generator=generator) * 0.02).to(torch.bfloat16)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.stored.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
            part = flat[start : start + _BLOCK_ELEMENTS]
            part.copy_(block[: part.numel()])
        weights[name] = tensor
    return weights


def named_tensors(weights: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """All names, that of the tied head included."""
    return [*weights.items(), (HEAD, weights[EMBEDDING])]


def mark(weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Change the first and the last element of every tensor."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        bits[0] = bits[-1] = version % _LARGEST_MARK


def train(weights: Mapping[str, torch.Tensor], version: int, share: float) -> None:
    """Move `share` of the elements, drawn anew for each version, by one unit in the last place, and mark all tensors.

    Tensors of which that is less than one element keep all but their marks.
    """
    generator = torch.Generator().manual_seed(version % (1 << 60))
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        count = int(share * len(bits))
        if count:
            bits[torch.randint(len(bits), (count,), generator=generator)] ^= 1
    mark(weights, version)


def check_marks(weights: Mapping[str, torch.Tensor], version: int, holder: str) -> None:
    """Raises SyncError where `holder` has a tensor of another version."""
    for name, tensor in weights.items():
        bits = tensor.view(-1).view(torch.int16)
        if int(bits[0]) != version % _LARGEST_MARK or int(bits[-1]) != version % _LARGEST_MARK:
            raise SyncError(f"{holder} holds {name!r} of another version than {version}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, one-dimensional uint8; a view."""
    return tensor.view(-1).view(torch.uint8)
