"""Many seeded schedules in worker processes, each judged, only what a test needs brought back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from paceline.testing.fault_plan import PlannedFault
from paceline.testing.simulation import run_schedule
from tests.simulation.supervised import supervise

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Judged:
    """One schedule."""

    faults: str
    planned: int
    landed: list[PlannedFault]
    violations: list[str]
    error: str
    syncs: int


def run_block(seeds: range) -> list[Judged]:
    """All schedules of these seeds, in this process."""
    torch.set_num_threads(1)
    reports = (run_schedule(seed, supervise) for seed in seeds)
    return [Judged(r.faults, len(r.planned), r.landed, r.violations, r.error, r.syncs) for r in reports]


def run_blocks(schedules: int, block: int) -> Iterator[Judged]:
    """Schedules 0 to `schedules`, in blocks over two processes."""
    blocks = [range(begin, begin + block) for begin in range(0, schedules, block)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for judged in pool.map(run_block, blocks):
            yield from judged
