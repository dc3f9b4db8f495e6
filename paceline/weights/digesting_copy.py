"""The copy that takes the digest: each line is hashed, looked at and stored in one pass (`leaf_pass`).

The digest is taken of what was to be written: a copy that went wrong is found by who reads it. Nothing is raised for
NaN and infinity here; they are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.weights.digest import flat
from paceline.weights.finite import ExponentTest, count_nonfinite, exponent_test
from paceline.weights.leaf_runs import copy_leaves
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

    What lies in this memory as it is sent goes in a few calls (`leaf_runs`). What is cast or on a device goes leaf by
    leaf, other strides are copied whole first. Unless `nonfinite` is "off" the written values are also counted (see
    `finite`).
    """
    plain: dict[ExponentTest, list[_Span]] = {}
    others: list[_Span] = []
    leaves: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    for job in jobs:
        leaves[job.name], counts[job.name] = b"", 0  # of an empty tensor there is no span
        span = _Span(job.name, job.source.detach().resolve_conj().resolve_neg(), job.target)
        test = _NO_TEST if nonfinite == "off" else exponent_test(job.target.dtype)
        if span.is_plain and test is not None:
            plain.setdefault(test, []).append(span)
        else:
            others += span.cut()
    for test, spans in plain.items():
        pairs = [(_bytes_of(flat(span.source)), _bytes_of(span.target.view(-1))) for span in spans]
        for span, (source, _), found in zip(spans, pairs, copy_leaves(pairs, test.mask, threads), strict=True):
            leaves[span.name], largest = found
            counts[span.name] = span.count(source) if largest >= test.bound else 0
    scratch: SimpleQueue[torch.Tensor] = SimpleQueue()
    for _ in range(max(1, threads) if others else 0):  # not each thread its own: the allocator would keep them all
        scratch.put(torch.empty(LEAF_BYTES, dtype=torch.uint8))
    for name, found_leaves, count in share_out(threads, lambda span: span.run(nonfinite, scratch), others):
        leaves[name] += found_leaves
        counts[name] += count
    return CopyResult(
        digests={name: tensor_digest([parts]) for name, parts in leaves.items()},
        nonfinite={name: count for name, count in counts.items() if count},
    )


@dataclass(frozen=True)
class _Span:
    """The whole of a job, or a run of whole leaves of one with a dense source (flat elements)."""

    name: str
    source: torch.Tensor
    target: torch.Tensor

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are written as they lie in this memory."""
        source = self.source
        return source.dtype == self.target.dtype and source.device.type == "cpu" and source.is_contiguous()

    def cut(self) -> Iterator[_Span]:
        """Into runs of whole leaves, where the source is dense."""
        if not self.source.is_contiguous():
            yield self
            return
        dense, target = flat(self.source), self.target.view(-1)
        step = _LEAVES_PER_SPAN * LEAF_BYTES // target.element_size()
        for start in range(0, target.numel(), step):
            yield _Span(self.name, dense[start : start + step], target[start : start + step])

    def run(self, nonfinite: Nonfinite, scratch: SimpleQueue[torch.Tensor]) -> tuple[str, bytes, int]:
        """The job's name, digests of the leaves, and non-finite elements in all of them.

        `scratch` holds one buffer of a leaf for each thread.
        """
        written = _bytes_of(self.target.view(-1))
        test = _NO_TEST if nonfinite == "off" else exponent_test(self.target.dtype)
        leaves, count, place = b"", 0, 0
        leaf = scratch.get_nowait()
        for part in self._parts(leaf):
            target = written[place : place + len(part)]
            ((digests, largest),) = copy_leaves([(part, target)], _NO_TEST.mask if test is None else test.mask)
            if test is None or largest >= test.bound:
                count += self.count(part)
            leaves += digests
            place += len(part)
        scratch.put(leaf)
        return self.name, leaves, count

    def count(self, part: NDArray[np.uint8]) -> int:
        """Non-finite elements in bytes as they are written."""
        return count_nonfinite(torch.from_numpy(part).view(self.target.dtype))

    def _parts(self, leaf: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
        """The bytes to write, in runs of whole leaves: as they lie there, or by way of `leaf` where they are cast."""
        source = self.source
        if source.dim() != 1 or not source.is_contiguous():
            source = self.target.copy_(source).view(-1)  # stored on itself then, which spares a second buffer
        if source.dtype == self.target.dtype and source.device.type == "cpu":
            yield _bytes_of(source)
            return
        values = leaf.view(self.target.dtype)
        for start in range(0, source.numel(), len(values)):
            part = source[start : start + len(values)]
            yield _bytes_of(values[: part.numel()].copy_(part))


def _bytes_of(dense: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = dense.view(torch.uint8).numpy()
    return array
