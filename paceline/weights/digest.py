"""The tree digest of tensors, and the copy that takes it: each 1 MiB leaf is hashed while its bytes are warm.

The digest is that of dense, row-major bytes: strides of the source do not count. See `tree_digest` for the scheme. It
is taken of what was to be written: a copy that went wrong, or a source that changed under it, is found by who reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.weights.dtypes import dtype_name
from paceline.weights.finite import count_nonfinite
from paceline.weights.tree_digest import LEAF_BYTES, leaf_digest, leaf_digests, root_digest, tensor_digest

T = TypeVar("T")
R = TypeVar("R")

_LEAVES_PER_SPAN = 8
_RUN_BYTES = 16 * LEAF_BYTES


@dataclass(frozen=True)
class CopyJob:
    """Copy `source` (any strides, any device) into `target` (dense, on the CPU, maybe of another type)."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class CopyResult:
    """By name: tensor digests, of the values as they are in the targets, and non-finite elements (where asked for)."""

    digests: dict[str, bytes]
    nonfinite: dict[str, int]


def digest_tensors(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], threads: int = 1) -> str:
    """Hex root digest of tensors of any strides; names in `aliases` stand for the stored tensor they map to."""
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    entries = {
        name: (dtype_name(tensors[name].dtype), tuple(tensors[name].shape), digest)
        for name, digest in digest_each(stored, threads).items()
    }
    return root_digest(entries, aliases)


def digest_each(tensors: Mapping[str, torch.Tensor], threads: int = 1) -> dict[str, bytes]:
    """Digest of each tensor's dense bytes; large tensors are shared out among the threads."""
    runs: list[tuple[str, NDArray[np.uint8]]] = []
    for name, tensor in tensors.items():
        raw = dense_bytes(tensor)
        runs += [(name, raw[start : start + _RUN_BYTES]) for start in range(0, len(raw), _RUN_BYTES)]
    leaves: dict[str, list[bytes]] = {name: [] for name in tensors}
    for (name, _), digests in zip(runs, _each(threads, lambda run: leaf_digests(run[1].data), runs), strict=True):
        leaves[name] += digests
    return {name: tensor_digest(parts) for name, parts in leaves.items()}


def dense_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The row-major bytes of a CPU tensor, one-dimensional; a view where the tensor is dense."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    array: NDArray[np.uint8] = _flat(plain.contiguous()).view(torch.uint8).numpy()
    return array


def copy_and_digest(jobs: list[CopyJob], nonfinite: Literal["error", "skip", "off"], threads: int = 1) -> CopyResult:
    """Copy every job's tensor, casting where the target's type differs, and digest what was written.

    Dense CPU sources go leaf by leaf; others are copied whole first. Unless `nonfinite` is "off" the written values
    are also counted (see `finite`); nothing is raised here.
    """
    spans = [span for job in jobs for span in _spans(job)]
    done = _each(threads, lambda span: span.run(nonfinite), spans)
    leaves: dict[str, list[bytes]] = {job.name: [] for job in jobs}
    counts: dict[str, int] = {job.name: 0 for job in jobs}
    for span, (digests, count) in zip(spans, done, strict=True):
        leaves[span.name] += digests
        counts[span.name] += count
    return CopyResult(
        digests={name: tensor_digest(parts) for name, parts in leaves.items()},
        nonfinite={name: count for name, count in counts.items() if count},
    )


@dataclass(frozen=True)
class _Span:
    """A run of whole leaves of one job: flat elements of a dense source, or the whole of another."""

    name: str
    source: torch.Tensor
    target: torch.Tensor

    def run(self, nonfinite: Literal["error", "skip", "off"]) -> tuple[list[bytes], int]:
        dense = self.source.dim() == 1 and self.source.is_contiguous()
        if not dense:
            self.target.copy_(self.source)
        target = self.target.view(-1)
        same_bytes = dense and self.source.dtype == target.dtype and self.source.device.type == "cpu"
        step = LEAF_BYTES // target.element_size()
        digests: list[bytes] = []
        count = 0
        for start in range(0, target.numel(), step):
            leaf = target[start : start + step]
            if dense and not same_bytes:
                leaf.copy_(self.source[start : start + step])
            # Where nothing is cast the source is read for all three, and written last: it is warm, the target is not.
            read = self.source[start : start + step] if same_bytes else leaf
            if nonfinite != "off":
                count += count_nonfinite(read)
            raw = read.view(torch.uint8).numpy()
            digests.append(leaf_digest(raw.data))
            if same_bytes:
                np.copyto(leaf.view(torch.uint8).numpy(), raw)
        return digests, count


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """One-dimensional, stride 1: a dense tensor of one element may have any stride, and byte views refuse others."""
    return dense.as_strided((dense.numel(),), (1,))


def _spans(job: CopyJob) -> Iterator[_Span]:
    source = job.source.detach().resolve_conj().resolve_neg()
    if not source.is_contiguous():
        yield _Span(job.name, source, job.target)
        return
    flat, target = _flat(source), job.target.view(-1)
    step = _LEAVES_PER_SPAN * LEAF_BYTES // target.element_size()
    for start in range(0, target.numel(), step):
        yield _Span(job.name, flat[start : start + step], target[start : start + step])


def _each(threads: int, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    if threads <= 1 or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="paceline-copy") as pool:
        return list(pool.map(call, items))
