"""The sender's side: from two versions of named tensors to the bytes of a delta.

Runs of elements are scanned in threads; symbols of about `SET_CHANGES` changes are held, then get tables and are coded.
Per run the smallest is taken: nothing, sparse, or (tried where sparse saves less than half) dense, raw or zstd. Reads
`base` and `target`, which must not change meanwhile, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray

from paceline.core.errors import CoverageError
from paceline.weights.delta import entropy, message, scan, tables
from paceline.weights.delta.message import DeltaHeader, Run, TableSet
from paceline.weights.delta.number_line import NumberLine, bits_of, line_of
from paceline.weights.delta.planes import Level, planes_of

T = TypeVar("T")
R = TypeVar("R")

SET_CHANGES = 1 << 22
SAMPLE_CHUNK = 1 << 12
SAMPLE_EVERY = 16
_START_STATE = 1 << 16


@dataclass(frozen=True)
class EncodedDelta:
    """`data` is the whole message; `per_tensor` has changed elements and payload bytes of each changed tensor."""

    data: bytes
    header: DeltaHeader
    per_tensor: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Job:
    tensor: int
    start: int
    line: NumberLine
    base: NDArray[Any]
    target: NDArray[Any]


@dataclass(frozen=True)
class _Tokens:
    """Symbols of a scanned run, and the keys of its classes."""

    job: _Job
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    gap_keys: list[int]
    distance_keys: list[int]
    gap_symbols: NDArray[np.uint8]
    distance_symbols: NDArray[np.uint8]
    gap_counts: NDArray[np.int64]
    distance_counts: NDArray[np.int64]
    bits: NDArray[np.uint32]


def count_changes(base: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], threads: int = 1) -> int:
    """How many elements differ, at the speed of a comparison: what the choice between delta and full needs.

    Raises:
        CoverageError: the two do not have the same names, types and shapes.
    """
    _check_same(base, target)
    return sum(_each(threads, lambda job: int(scan.count_changes(job.base, job.target)), list(_jobs(base, target))))


def sampled_share(base: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> float:
    """About which share of the elements differs, from one chunk in `SAMPLE_EVERY` of each tensor.

    Raises:
        CoverageError: as `count_changes`.
    """
    _check_same(base, target)
    seen = changed = 0
    for name in base:
        old, new = bits_of(base[name]), bits_of(target[name])
        for start in range(0, len(old), SAMPLE_CHUNK * SAMPLE_EVERY):
            part = slice(start, start + SAMPLE_CHUNK)
            seen += len(old[part])
            changed += int(scan.count_changes(old[part], new[part]))
    return changed / max(1, seen)


def encode(
    base: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    level: Level,
    *,
    base_version: int,
    version: int,
    base_digest: str,
    target_digest: str,
    threads: int = 1,
) -> EncodedDelta:
    """Encode what turns `base` into `target`: dense CPU tensors, aliases left out. No change gives a valid empty delta.

    Raises:
        CoverageError: the two do not have the same names, types and shapes.
        SyncError: a tensor is not dense, not on the CPU, or of a width that is not known.
    """
    _check_same(base, target)
    jobs = list(_jobs(base, target))
    runs: list[Run] = []
    payloads: list[bytes] = []
    table_sets: list[TableSet] = []
    for held in _sets(jobs, level, threads):
        table_set, coded = _code_set(held, len(table_sets), threads)
        table_sets.append(table_set)
        runs += [run for run, _ in coded]
        payloads += [payload for _, payload in coded]
    digest = xxhash.xxh3_128()
    for payload in payloads:
        digest.update(payload)
    header = DeltaHeader(
        level=level,
        base_version=base_version,
        version=version,
        base_digest=base_digest,
        target_digest=target_digest,
        layout=message.layout_digest(base),
        run_elements=message.RUN_ELEMENTS,
        total=sum(len(job.base) for job in jobs),
        changed=sum(run.changed for run in runs),
        full_bytes=message.full_bytes_of(base),
        body_bytes=sum(len(payload) for payload in payloads),
        body_digest=digest.hexdigest(),
        table_sets=tuple(table_sets),
        runs=tuple(runs),
    )
    return EncodedDelta(message.write_delta(header, payloads), header, _per_tensor(base, runs))


def _jobs(base: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> Iterator[_Job]:
    for index, name in enumerate(sorted(base)):
        line = line_of(base[name].dtype)
        old, new = bits_of(base[name]), bits_of(target[name])
        for start in range(0, len(old), message.RUN_ELEMENTS):
            end = start + message.RUN_ELEMENTS
            yield _Job(index, start // message.RUN_ELEMENTS, line, old[start:end], new[start:end])


def _sets(jobs: list[_Job], level: Level, threads: int) -> Iterator[list[_Tokens]]:
    """Scanned runs that changed, in order, gathered to about `SET_CHANGES` changes."""
    held: list[_Tokens] = []
    changes = 0
    step = max(1, 2 * threads)
    for first in range(0, len(jobs), step):
        for tokens in _each(threads, lambda job: _scan(job, level), jobs[first : first + step]):
            if tokens is not None:
                held.append(tokens)
                changes += sum(tokens.counts)
        if changes >= SET_CHANGES:
            yield held
            held, changes = [], 0
    if held:
        yield held


def _scan(job: _Job, level: Level) -> _Tokens | None:
    planes = planes_of(job.base, job.target, job.line, level)
    if not planes.changed:
        return None
    changed, classes = planes.changed, len(planes.counts)
    gap_symbols, distance_symbols = np.empty(changed, np.uint8), np.empty(changed, np.uint8)
    gap_counts, distance_counts = np.zeros((2, classes, entropy.SYMBOLS), np.int64)
    bits = np.empty(entropy.EXTRA_WORDS * changed + 2, np.uint32)
    state = np.zeros(3, np.uint64)
    gap_keys: list[int] = []
    distance_keys: list[int] = []
    first = 0
    for k, count in enumerate(planes.counts.tolist()):
        part = slice(first, first + count)
        entropy.tokenise(
            planes.gaps[part], planes.distances[part], gap_symbols[part], distance_symbols[part],
            gap_counts[k], distance_counts[k], bits, state,
        )  # fmt: skip
        mean = float(planes.distances[part].mean(dtype=np.float64)) if count else 1.0
        gap_keys.append(tables.key_of(float(planes.totals[k]) / max(1, count)))
        distance_keys.append(tables.key_of(mean))
        first += count
    word, held, have = (int(value) for value in state)
    if have:
        bits[word] = held
        word += 1
    return _Tokens(
        job, planes.edges, tuple(planes.counts.tolist()), gap_keys, distance_keys, gap_symbols, distance_symbols,
        gap_counts, distance_counts, bits[:word].copy(),
    )  # fmt: skip


def _code_set(held: list[_Tokens], index: int, threads: int) -> tuple[TableSet, list[tuple[Run, bytes]]]:
    gap_counts = np.zeros((tables.KEYS, entropy.SYMBOLS), np.int64)
    distance_counts = np.zeros((tables.KEYS, entropy.SYMBOLS), np.int64)
    for tokens in held:
        np.add.at(gap_counts, tokens.gap_keys, tokens.gap_counts)
        np.add.at(distance_counts, tokens.distance_keys, tokens.distance_counts)
    gap_table_of, gap_shares = tables.share_tables(gap_counts)
    distance_table_of, distance_shares = tables.share_tables(distance_counts)
    gap_tables = [tables.coder_table(shares) for shares in gap_shares]
    distance_tables = [tables.coder_table(shares) for shares in distance_shares]

    def code(tokens: _Tokens) -> tuple[Run, bytes]:
        pairs = [
            (int(gap_table_of[gap]), int(distance_table_of[distance]))
            for gap, distance in zip(tokens.gap_keys, tokens.distance_keys, strict=True)
        ]
        words = _rans(tokens, [(gap_tables[gap], distance_tables[distance]) for gap, distance in pairs])
        payload = words.astype("<u2").tobytes() + tokens.bits.astype("<u4").tobytes()
        job = tokens.job
        raw = job.base.nbytes
        if 2 * len(payload) > raw and (dense := _dense(tokens, min(raw, len(payload) - 1))) is not None:
            return dense
        flat = bytes(value for pair in pairs for value in pair)
        run = Run(
            job.tensor, job.start, message.SPARSE, len(payload), len(words), tokens.edges, tokens.counts, flat, index
        )
        return run, payload

    packed = TableSet(
        tuple(tables.pack(shares) for shares in gap_shares), tuple(tables.pack(shares) for shares in distance_shares)
    )
    return packed, _each(threads, code, held)


def _rans(tokens: _Tokens, pairs: Sequence[tuple[NDArray[np.uint32], NDArray[np.uint32]]]) -> NDArray[np.uint16]:
    words = np.empty(2 * len(tokens.gap_symbols) + 4, np.uint16)
    state = np.array([len(words), _START_STATE, _START_STATE], np.uint64)
    last = len(tokens.gap_symbols)
    for count, (gap_table, distance_table) in zip(reversed(tokens.counts), reversed(pairs), strict=True):
        part = slice(last - count, last)
        entropy.encode(tokens.gap_symbols[part], tokens.distance_symbols[part], gap_table, distance_table, words, state)
        last -= count
    free, gap_state, distance_state = (int(value) for value in state)
    words[free - 4 : free] = [gap_state >> 16, gap_state & 0xFFFF, distance_state >> 16, distance_state & 0xFFFF]
    return words[free - 4 :]


def _dense(tokens: _Tokens, limit: int) -> tuple[Run, bytes] | None:
    """The dense form, zstd or raw, if it takes at most `limit` bytes."""
    job = tokens.job
    raw = np.bitwise_xor(job.base, job.target).tobytes()
    packed = zstandard.ZstdCompressor(level=1).compress(raw)
    mode, payload = (message.DENSE_ZSTD, packed) if len(packed) < len(raw) else (message.DENSE, raw)
    if len(payload) > limit:
        return None
    return Run(job.tensor, job.start, mode, len(payload), 0, (), (sum(tokens.counts),), b"", 0), payload


def _check_same(base: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    reasons = [f"{name!r} is in one version only" for name in sorted(set(base) ^ set(target))]
    reasons += [
        f"{name!r} was {_described(base[name])} and is {_described(target[name])}"
        for name in sorted(set(base) & set(target))
        if base[name].dtype != target[name].dtype or base[name].shape != target[name].shape
    ]
    if reasons:
        raise CoverageError(f"no delta between different layouts: {'; '.join(reasons)}")


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _per_tensor(base: Mapping[str, torch.Tensor], runs: list[Run]) -> dict[str, tuple[int, int]]:
    names = sorted(base)
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        changed, nbytes = found.get(names[run.tensor], (0, 0))
        found[names[run.tensor]] = (changed + run.changed, nbytes + run.nbytes)
    return found


def _each(threads: int, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    if threads <= 1 or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="paceline-delta") as pool:
        return list(pool.map(call, items))
