"""`paceline bench sync`: how long a version of the weights takes from the trainer to all replicas, beside its peers.

The trainer and every replica are processes of their own; rounds with different numbers of replicas, and those of a
peer, take turns, and each round is compared with a plain copy measured just before it. What the figures mean is said
in `sync_bench.figures`. All processes and directories are gone at the end, whatever ends it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from paceline.cli.sync_bench.messages import Apply, Engine, Mode
from paceline.core.errors import ConfigError
from paceline.runtime.process_guard import ProcessGuard
from paceline.store.capacity import check_memory

if TYPE_CHECKING:
    from paceline.cli.sync_bench.figures import Machine, PeerRow, SyncRow, Way
    from paceline.cli.sync_bench.measurement import Measured, MeasurementPlan

CLEAN_UP_SECONDS = 20.0
# What a process has beside weights: interpreter and torch.
_PROCESS_BYTES = 150 << 20
_SHARED_MEMORY = Path("/dev/shm")
T = TypeVar("T", bound=str)
_HEADER = (
    f"{'engine':<14} {'mode':<5} {'apply':<7} {'N':>2} {'seconds':>8} {'of memcpy':>9} {'x first':>7} "
    f"{'pause p50':>10} {'p99':>9} {'p99+step':>9} {'of sync':>8} {'verify':>7} {'guard':>6} {'moved':>11} "
    f"{'memory':>9}"
)


def run(
    *,
    json_path: Path | None,
    gib: float,
    replicas: str,
    engines: str,
    modes: str,
    apply: str,
    peers: str,
    rounds: int,
) -> int:
    """Measure, print a table, write it to `json_path` if there is one; 0.

    Raises:
        ConfigError, CapacityError: an option that cannot be, or too little memory. PacelineError: a process failed.
    """
    from paceline.cli.sync_bench.measurement import Measurement, MeasurementPlan
    from paceline.cli.sync_bench.model_shapes import shapes_of

    home = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    in_memory = _SHARED_MEMORY / home.name if _SHARED_MEMORY.is_dir() else home / "in_memory"
    try:
        plan = MeasurementPlan(
            gib=gib,
            replicas=_counts(replicas),
            ways=_ways(engines, modes, apply),
            peers=_peers(peers),
            rounds=_at_least_one(rounds),
            threads=min(2, len(os.sched_getaffinity(0))),
            home=home,
            in_memory=in_memory,
        )
        model_bytes = shapes_of(gib).nbytes
        _check_room(plan, model_bytes)
        guard = ProcessGuard.start([home, in_memory])
        try:
            print(f"{model_bytes / (1 << 30):.2f} GiB of Qwen2.5-0.5B shapes, {plan.threads} threads, {rounds} rounds")
            print(_HEADER, flush=True)
            measured = asyncio.run(Measurement(plan, _print_row).run())
        finally:
            guard.finish(CLEAN_UP_SECONDS)
    finally:
        for directory in (home, in_memory):
            shutil.rmtree(directory, ignore_errors=True)
    _finish(measured, model_bytes, plan.threads, json_path)
    return 0


def _finish(measured: Measured, model_bytes: int, threads: int, json_path: Path | None) -> None:
    from paceline.cli.sync_bench.figures import SyncReport

    machine = _machine(measured)
    print(
        f"memcpy {machine.memcpy_1thread_gbps:.1f} GB/s with one thread, {machine.memcpy_2threads_gbps:.1f} with two; "
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gib:.0f} GiB, Linux {machine.kernel}"
    )
    if json_path is not None:
        report = SyncReport(
            machine=machine,
            results=measured.rows,
            peers=measured.peers,
            model_bytes=model_bytes,
            threads=threads,
            command=" ".join(["paceline", *sys.argv[1:]]),
        )
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _print_row(row: SyncRow | PeerRow) -> None:
    from paceline.cli.sync_bench.figures import SyncRow

    if isinstance(row, SyncRow):
        print(
            f"{row.engine:<14} {row.mode:<5} {row.apply:<7} {row.replicas:>2} {row.seconds:>8.3f} "
            f"{row.ratio_to_memcpy:>9.2f} {row.times_first:>7.2f} {row.pause_seconds_p50 * 1e3:>7.2f} ms "
            f"{row.pause_seconds_p99 * 1e3:>6.2f} ms {row.pause_with_first_step_p99 * 1e3:>6.2f} ms "
            f"{row.pause_to_sync:>8.2%} {row.verify_share:>7.0%} {row.guard_share:>6.0%} "
            f"{row.bytes_moved / (1 << 20):>7.1f} MiB {row.peak_bytes / (1 << 30):>5.2f} GiB",
            flush=True,
        )
        return
    pause = f", pause {row.pause_seconds:.3f} s" if row.pause_seconds else ""
    print(
        f"{row.name:<14} {'peer':<13} {row.replicas:>2} {row.seconds:>8.3f}   {row.times_engine:.1f} times the "
        f"engine's {row.engine_seconds:.3f} s{pause}",
        flush=True,
    )


def _counts(text: str) -> tuple[int, ...]:
    from paceline.cli.sync_bench.measurement import chosen_counts

    counts = tuple(chosen_counts(text))
    if not counts:
        raise ConfigError(f"--replicas: {text!r} is no list of numbers from 1 to 64, such as 1,2,4,8")
    return counts


def _ways(engines: str, modes: str, applies: str) -> tuple[Way, ...]:
    """Every engine in every mode with every way to apply, but for the one that is no other than the full mode."""
    from paceline.cli.sync_bench.figures import Way

    ways = tuple(
        Way(engine, mode, apply)
        for engine in _chosen(engines, get_args(Engine), "--engines")
        for mode in _chosen(modes, get_args(Mode), "--modes")
        for apply in _chosen(applies, get_args(Apply), "--apply")
        if (engine, mode, apply) != ("shared_memory", "delta", "mapped")
    )
    if not ways:
        raise ConfigError("--modes: shared_memory has no delta for mapped replicas, to which nothing is copied")
    return ways


def _chosen(text: str, known: tuple[T, ...], option: str) -> tuple[T, ...]:
    """Those of the known names that an option names, in the order of the known."""
    chosen = {part.strip() for part in text.split(",")}
    unknown = sorted(chosen - set(known))
    if unknown:
        raise ConfigError(f"{option}: {', '.join(unknown)} is not a choice of {', '.join(map(str, known))}")
    return tuple(name for name in known if name in chosen)


def _peers(text: str) -> tuple[str, ...]:
    from paceline.cli.sync_bench.peers.peer_table import chosen_peers

    return chosen_peers(text)


def _at_least_one(rounds: int) -> int:
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {rounds}")
    return rounds


def _check_room(plan: MeasurementPlan, model_bytes: int) -> None:
    """What the largest session takes, and beside the first one a peer at its largest."""
    most = max(plan.replicas)
    beside = (3 + plan.peer_replicas) * model_bytes + (2 + plan.peer_replicas) * _PROCESS_BYTES if plan.peers else 0
    sessions = [_copies(way, most) * model_bytes + (1 + most) * _PROCESS_BYTES for way in plan.ways]
    check_memory(int(max(*sessions, sessions[0] + beside)), "trainer, versions, replicas and peers")


def _copies(way: Way, replicas: int) -> float:
    """How many models a session holds: the trainer's, the versions on the way, and what each replica owns."""
    own = 1.0 if way.apply == "copied" else 0.0
    if way.engine == "shared_memory":
        return 3 + replicas * own + (0.25 if way.mode == "delta" else 0)
    between = 2.0 if way.mode == "delta" else 1.0  # snapshots of the trainer
    if way.engine == "ray_object" and way.mode == "full":
        return 1 + between + 2.5 + replicas * own
    return 1 + between + 3 + replicas * (2 + own)


def _machine(measured: Measured) -> Machine:
    from paceline.cli.sync_bench.figures import Machine, rates_gbps

    one, two = rates_gbps(measured.rates)
    return Machine(
        memcpy_1thread_gbps=one,
        memcpy_2threads_gbps=two,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=installed("torch"),
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
