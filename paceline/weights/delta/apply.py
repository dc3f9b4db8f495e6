"""The receiver's side, second half: move weights from base to target and back, exactly.

`prepare` decodes beside a serving engine, down to the bits that each change inverts in this base; `apply` and
`subtract` then only invert those, in place. A cursor records which runs are done; the kernel that changes a run marks
it as its last act, so whatever stops the work between two runs, `subtract` with the same cursor restores the base bit
for bit.
`copy_and_apply` writes to another buffer
instead, run by run, and keeps nothing. No function proves the result: callers take the tree digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import SyncError
from paceline.weights.delta import scan
from paceline.weights.delta.decode import Flips, RunDecoder
from paceline.weights.delta.message import Delta, DeltaHeader, Run, check_base
from paceline.weights.delta.number_line import NumberLine, bits_of, line_of


@dataclass(frozen=True)
class FlipsAt:
    """Positions within a run, each once, and the bits to invert there."""

    positions: NDArray[np.uint32]
    patterns: NDArray[Any]


@dataclass(frozen=True)
class PreparedDelta:
    """A decoded delta: which bits of each run are to be inverted. Holds 4 bytes and an element per change."""

    header: DeltaHeader
    steps: tuple[FlipsAt | Flips, ...]

    def cursor(self) -> Cursor:
        """A cursor for tensors that hold the base."""
        return Cursor(np.zeros(len(self.steps), np.uint8))


@dataclass(frozen=True)
class Cursor:
    """Which runs the tensors have: 1 where the target's, 0 where the base's. Belongs to one set of tensors."""

    done: NDArray[np.uint8]

    @property
    def applied(self) -> int:
        """How many runs are the target's."""
        return int(self.done.sum())


def prepare(delta: Delta, tensors: Mapping[str, torch.Tensor], *, base_digest: str, threads: int = 1) -> PreparedDelta:
    """Decode all runs against `tensors`, which hold the base and are only read.

    Raises:
        DigestMismatch: `base_digest`, the proved digest of `tensors`, is not that of the delta's base.
        CoverageError: names, types or shapes are not the sender's.
        SyncError: a size or a payload is not what an encoder writes.
    """
    check_base(delta.header, tensors, base_digest)
    decoder, names = RunDecoder(delta.header), sorted(tensors)
    payloads = _payloads(delta)

    def decode(index: int) -> FlipsAt | Flips:
        run = delta.header.runs[index]
        base, line = _run_bits(tensors[names[run.tensor]], run, delta.header)
        step = decoder.decode(run, payloads[index], base, line)
        if isinstance(step, Flips):
            return step
        patterns = step.distances
        scan.patterns_of(base, step.positions, patterns, line.arithmetic)
        return FlipsAt(step.positions, patterns)

    return PreparedDelta(delta.header, tuple(_each(threads, decode, len(payloads))))


def apply(prepared: PreparedDelta, tensors: Mapping[str, torch.Tensor], cursor: Cursor, threads: int = 1) -> None:
    """Bring every run that the cursor does not have to the target, in place. Going on after a stop is allowed."""
    _invert(prepared, tensors, cursor, np.flatnonzero(cursor.done == 0), threads)


def subtract(prepared: PreparedDelta, tensors: Mapping[str, torch.Tensor], cursor: Cursor, threads: int = 1) -> None:
    """Take every run that the cursor has back to the base, in place, bit for bit."""
    _invert(prepared, tensors, cursor, np.flatnonzero(cursor.done == 1)[::-1], threads)


def copy_and_apply(
    delta: Delta,
    base: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    *,
    base_digest: str,
    threads: int = 1,
) -> None:
    """Write the target version into `target` (other memory, same layout); `base` is only read.

    On an error `target` is of no use and `base` is whole.

    Raises:
        DigestMismatch, CoverageError, SyncError: as `prepare`.
    """
    check_base(delta.header, base, base_digest)
    check_base(delta.header, target, base_digest)
    decoder, names, header = RunDecoder(delta.header), sorted(base), delta.header
    changed = {(run.tensor, run.start): index for index, run in enumerate(header.runs)}
    payloads = _payloads(delta)
    jobs = [
        (tensor, start)
        for tensor, name in enumerate(names)
        for start in range(-(-len(bits_of(base[name])) // header.run_elements))
    ]

    def copy(number: int) -> None:
        tensor, start = jobs[number]
        name, line = names[tensor], line_of(base[names[tensor]].dtype)
        part = slice(start * header.run_elements, (start + 1) * header.run_elements)
        old, new = bits_of(base[name])[part], bits_of(target[name])[part]
        index = changed.get((tensor, start))
        if index is None:
            np.copyto(new, old)
            return
        step = decoder.decode(header.runs[index], payloads[index], old, line)
        np.copyto(new, old)  # after decoding, which has brought `old` into the cache
        if isinstance(step, Flips):
            scan.flip(new, step.bits, np.zeros(1, np.uint8), 0)
        else:
            scan.shift(new, step.positions, step.distances, line.arithmetic)

    _each(threads, copy, len(jobs))


def _invert(
    prepared: PreparedDelta,
    tensors: Mapping[str, torch.Tensor],
    cursor: Cursor,
    todo: NDArray[np.intp],
    threads: int,
) -> None:
    names, header = sorted(tensors), prepared.header
    if len(cursor.done) != len(prepared.steps):
        raise SyncError("the cursor belongs to another delta")

    def invert(number: int) -> None:
        index = int(todo[number])
        run, step = header.runs[index], prepared.steps[index]
        bits, _ = _run_bits(tensors[names[run.tensor]], run, header)
        if isinstance(step, Flips):
            scan.flip(bits, step.bits, cursor.done, index)
        else:
            scan.flip_at(bits, step.positions, step.patterns, cursor.done, index)

    _each(threads, invert, len(todo))


def _run_bits(tensor: torch.Tensor, run: Run, header: DeltaHeader) -> tuple[NDArray[Any], NumberLine]:
    start = run.start * header.run_elements
    return bits_of(tensor)[start : start + header.run_elements], line_of(tensor.dtype)


def _payloads(delta: Delta) -> list[memoryview]:
    found: list[memoryview] = []
    end = 0
    for run in delta.header.runs:
        found.append(delta.body[end : end + run.nbytes])
        end += run.nbytes
    return found


def _each(threads: int, call: Callable[[int], Any], count: int) -> list[Any]:
    if threads <= 1 or count < 2:
        return [call(index) for index in range(count)]
    with ThreadPoolExecutor(threads, thread_name_prefix="paceline-delta") as pool:
        return list(pool.map(call, range(count)))
