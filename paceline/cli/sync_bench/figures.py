"""The figures of `paceline bench sync`, made of measured rounds. Pure.

ratio_to_memcpy   (bytes of the model / one-thread memcpy rate) / seconds: the fraction of the speed of one plain copy
                  at which all replicas together come to serve a version; median over rounds, each with its own rate
pause_seconds     from the end of one decode step to the begin of the next with the swap between them, over all
                  rounds and replicas; p99 is the largest below 100 samples (nearest rank)
pause_to_sync     the longest pause of a round / its seconds; median over rounds
verify_share      seconds spent on digests (the trainer's on top of its copy; the replicas': once per node where they
                  share the bytes, else in each, and once more of each copied replica's own memory) / seconds, each
                  part timed by itself in the same session
guard_share       the same for the search for NaN and infinity
bytes_moved       shared_memory: into the arena, and what each replica that owns its memory takes from there;
                  ray_object: the object, once per node; filesystem: what is written, and what each replica reads
times_first       seconds / those of the smallest number of replicas in the same round; median over rounds
times_engine      a peer's seconds / the engine's in the round before it; median over rounds
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from paceline.cli.sync_bench.engine_session import SyncRound
from paceline.cli.sync_bench.messages import Apply, CaptureParts, CopyRate, Engine, Mode
from paceline.cli.sync_bench.peer_session import PeerRound


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured; rates in 1e9 bytes per second, medians over all rounds."""

    memcpy_1thread_gbps: float
    memcpy_2threads_gbps: float
    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str


class SyncRow(msgspec.Struct, frozen=True):
    """One engine in one mode with one way to apply and so many replicas; see the module for what the figures mean."""

    engine: Engine
    mode: Mode
    apply: Apply
    replicas: int
    seconds: float
    ratio_to_memcpy: float
    pause_seconds_p50: float
    pause_seconds_p99: float
    pause_to_sync: float
    bytes_moved: int
    verify_share: float
    peak_bytes: int
    guard_share: float
    seconds_smallest: float
    ratio_to_memcpy_largest: float
    times_first: float
    pause_with_first_step_p50: float
    pause_with_first_step_p99: float
    plain_gap_and_step_p50: float
    first_step_faults: int
    phase_seconds: dict[str, float]
    rounds: int


class PeerRow(msgspec.Struct, frozen=True):
    """One peer. `engine_seconds` are of the engine's rounds between its own; `pause_seconds` 0: it does not decode."""

    name: str
    replicas: int
    seconds: float
    seconds_smallest: float
    engine_seconds: float
    times_engine: float
    pause_seconds: float
    rounds: int


class SyncReport(msgspec.Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    results: list[SyncRow]
    peers: list[PeerRow]
    model_bytes: int
    threads: int
    command: str


class Way(msgspec.Struct, frozen=True):
    """What is measured: how weights are moved, what is sent, how replicas take it."""

    engine: Engine
    mode: Mode
    apply: Apply


class Costs(msgspec.Struct, frozen=True):
    """Measured beside the rounds: parts of the capture, the replicas' digests in seconds, memory in bytes."""

    capture: CaptureParts
    digest_seconds: float
    peak_bytes: int


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value with at least `percent` of all values at or below it."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def bytes_moved(way: Way, one: SyncRound) -> int:
    """See the module."""
    if way.engine == "shared_memory":
        return one.nbytes + (sum(one.taken) if way.apply == "copied" else 0)
    return max(one.taken) + (sum(one.taken) if way.engine == "filesystem" else 0)


def sync_row(way: Way, replicas: int, rounds: Sequence[SyncRound], first: Sequence[SyncRound], costs: Costs) -> SyncRow:
    """The row of `rounds`; `first` are those with the fewest replicas, in the same order."""
    seconds = statistics.median(r.seconds for r in rounds)
    ratios = [r.nbytes / r.rate.one_thread / r.seconds for r in rounds]
    pauses = [pause for r in rounds for pause in r.pauses]
    gaps = [pause.gap for pause in pauses]
    with_step = [pause.gap + pause.first_step for pause in pauses]
    return SyncRow(
        engine=way.engine,
        mode=way.mode,
        apply=way.apply,
        replicas=replicas,
        seconds=seconds,
        ratio_to_memcpy=statistics.median(ratios),
        pause_seconds_p50=percentile(gaps, 50),
        pause_seconds_p99=percentile(gaps, 99),
        pause_to_sync=statistics.median(max(p.gap for p in r.pauses) / r.seconds for r in rounds),
        bytes_moved=int(statistics.median(bytes_moved(way, r) for r in rounds)),
        verify_share=(costs.capture.digest_seconds + costs.digest_seconds) / seconds,
        peak_bytes=costs.peak_bytes,
        guard_share=costs.capture.guard_seconds / seconds,
        seconds_smallest=min(r.seconds for r in rounds),
        ratio_to_memcpy_largest=max(ratios),
        times_first=statistics.median(r.seconds / f.seconds for r, f in zip(rounds, first, strict=True)),
        pause_with_first_step_p50=percentile(with_step, 50),
        pause_with_first_step_p99=percentile(with_step, 99),
        plain_gap_and_step_p50=statistics.median(p.plain_gap + p.plain_step for p in pauses),
        first_step_faults=max(p.first_step_faults for p in pauses),
        phase_seconds={name: statistics.median(r.phases[name] for r in rounds) for name in rounds[0].phases},
        rounds=len(rounds),
    )


def peer_row(name: str, replicas: int, rounds: Sequence[PeerRound], engine: Sequence[SyncRound]) -> PeerRow:
    """The row of a peer; `engine` are the rounds before its own."""
    return PeerRow(
        name=name,
        replicas=replicas,
        seconds=statistics.median(r.seconds for r in rounds),
        seconds_smallest=min(r.seconds for r in rounds),
        engine_seconds=statistics.median(r.seconds for r in engine),
        times_engine=statistics.median(r.seconds / e.seconds for r, e in zip(rounds, engine, strict=True)),
        pause_seconds=statistics.median(r.pause for r in rounds),
        rounds=len(rounds),
    )


def rates_gbps(rates: Sequence[CopyRate]) -> tuple[float, float]:
    """Median rates with one and with two threads."""
    return (
        statistics.median(rate.one_thread for rate in rates) / 1e9,
        statistics.median(rate.two_threads for rate in rates) / 1e9,
    )
