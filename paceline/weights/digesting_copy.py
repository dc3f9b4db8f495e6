"""The copy that takes the digest: each line is hashed, looked at and stored in one pass (`leaf_pass`).

The digest is taken of what was to be written: a copy that went wrong is found by who reads it. Nothing is raised for
NaN and infinity here; they are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.weights.digest import flat
from paceline.weights.finite import ExponentTest, count_nonfinite, exponent_test
from paceline.weights.leaf_pass import copy_leaves
from paceline.weights.tree_digest import LEAF_BYTES, tensor_digest
from paceline.weights.work_sharing import share_out

Nonfinite = Literal["error", "skip", "off"]

_LEAVES_PER_SPAN = 4
# No element reaches it: what is copied without a look.
_NO_TEST = ExponentTest(np.uint64(0), 1)


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


def copy_and_digest(jobs: Iterable[CopyJob], nonfinite: Nonfinite, threads: int = 1) -> CopyResult:
    """Copy every job's tensor, casting where the target's type differs, and digest what was written.

    Dense sources go leaf by leaf; others are copied whole first. Unless `nonfinite` is "off" the written values are
    also counted (see `finite`).
    """
    leaves: dict[str, list[bytes]] = {}
    counts: dict[str, int] = {}

    def spans() -> Iterator[_Span]:
        for job in jobs:
            leaves[job.name], counts[job.name] = [], 0  # of an empty tensor there is no span
            yield from _spans(job)

    for name, digests, count in share_out(threads, lambda span: span.run(nonfinite), spans()):
        leaves[name] += digests
        counts[name] += count
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

    def run(self, nonfinite: Nonfinite) -> tuple[str, list[bytes], int]:
        """The job's name, digests of the leaves, and non-finite elements in all of them."""
        written = _bytes_of(self.target.view(-1))
        test = _NO_TEST if nonfinite == "off" else exponent_test(self.target.dtype)
        digests: list[bytes] = []
        count = 0
        place = 0
        for part in self._parts():
            target = written[place : place + len(part)]
            part_digests, largest = copy_leaves(target, part, _NO_TEST.mask if test is None else test.mask)
            if test is None or largest >= test.bound:
                count += count_nonfinite(torch.from_numpy(part).view(self.target.dtype))
            digests += part_digests
            place += len(part)
        return self.name, digests, count

    def _parts(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes to write, in runs of whole leaves: as they lie there, or one leaf at a time where they are cast."""
        source = self.source
        if source.dim() != 1 or not source.is_contiguous():
            source = self.target.copy_(source).view(-1)  # stored on itself then, which spares a second buffer
        if source.dtype == self.target.dtype and source.device.type == "cpu":
            yield _bytes_of(source)
            return
        step = LEAF_BYTES // self.target.element_size()
        scratch = torch.empty(min(step, source.numel()), dtype=self.target.dtype)
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            yield _bytes_of(scratch[: part.numel()].copy_(part))


def _bytes_of(dense: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = dense.view(torch.uint8).numpy()
    return array


def _spans(job: CopyJob) -> Iterator[_Span]:
    source = job.source.detach().resolve_conj().resolve_neg()
    if not source.is_contiguous():
        yield _Span(job.name, source, job.target)
        return
    dense, target = flat(source), job.target.view(-1)
    step = _LEAVES_PER_SPAN * LEAF_BYTES // target.element_size()
    for start in range(0, target.numel(), step):
        yield _Span(job.name, dense[start : start + step], target[start : start + step])
