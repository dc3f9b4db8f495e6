"""The laws under faults: 2,400 seeded schedules of whole runs, and five broken parts that must be caught.

A schedule that fails is replayed by `run_schedule(seed, supervise)`.
"""

from __future__ import annotations

import sys

import pytest

from paceline.testing.fault_plan import CELLS, FAULTS, PHASES, PlannedFault, coverage_table
from paceline.testing.simulation import ENDS_A_RUN, Parts, SimulationReport, run_schedule
from tests.simulation.broken_parts import (
    AdmitsBeforeTheFirstVersion,
    AdvancesBeforeAcknowledgement,
    BumpsBeforeTransfer,
    KeepsItsPrefixCache,
    StaysPausedOnError,
)
from tests.simulation.schedule_blocks import Judged, run_blocks
from tests.simulation.supervised import supervise

ROUNDS = 12  # each visits every cell once
SCHEDULES = ROUNDS * len(CELLS)
LEAST_SYNCS = 5


@pytest.fixture(scope="module")
def schedules() -> list[Judged]:
    """All schedules."""
    return list(run_blocks(SCHEDULES, len(CELLS)))


def test_no_schedule_breaks_a_law_or_hangs(schedules: list[Judged]) -> None:
    assert len(schedules) >= 2000
    broken = [f"{judged.faults}: {judged.violations[0]}" for judged in schedules if judged.violations]
    assert not broken, "\n".join(broken)


def test_most_faults_land_in_every_cell(schedules: list[Judged], capsys: pytest.CaptureFixture[str]) -> None:
    landed = [fault for judged in schedules for fault in judged.landed]
    planned = sum(judged.planned for judged in schedules)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(landed)} of {planned} faults landed\n{coverage_table(landed)}\n")
    assert len(landed) >= 0.8 * planned
    struck = {(fault.phase, fault.kind) for fault in landed}
    assert struck == {(phase, kind) for phase in PHASES for kind in FAULTS}


def test_runs_go_on_after_every_fault_that_can_be_survived(schedules: list[Judged]) -> None:
    ended = [judged for judged in schedules if judged.error]
    assert all(any(fault.phase in ENDS_A_RUN for fault in judged.landed) for judged in ended)
    short = [judged.faults for judged in schedules if not judged.error and judged.syncs < LEAST_SYNCS]
    assert not short, short


def test_a_schedule_is_replayed_by_its_seed() -> None:
    first, second = run_schedule(41, supervise), run_schedule(41, supervise)
    assert first.events == second.events
    assert first.virtual_seconds == second.virtual_seconds
    assert run_schedule(42, supervise).events != first.events


def run_broken(parts: Parts, *faults: PlannedFault) -> SimulationReport:
    return run_schedule(7, supervise, parts=parts, faults=faults)


def test_the_same_run_with_sound_parts_breaks_nothing() -> None:
    faults = PlannedFault("bind", "raise", "before", 4), PlannedFault("stage", "raise", "before", 4)
    report = run_broken(Parts(), *faults)
    assert (report.violations, report.error, len(report.landed)) == ([], "", 2)


@pytest.mark.parametrize(
    ("parts", "faults", "law"),
    [
        (Parts(synchronizer=BumpsBeforeTransfer), [], "V1"),
        (Parts(replica=StaysPausedOnError), [PlannedFault("bind", "raise", "before", 8)], "L2"),
        (Parts(synchronizer=AdvancesBeforeAcknowledgement), [PlannedFault("stage", "raise", "before", 4)], "V1"),
        (Parts(rollouter=AdmitsBeforeTheFirstVersion), [], "V5"),
        (Parts(engine=KeepsItsPrefixCache), [], "cache"),
    ],
    ids=["bump-before-transfer", "no-resume-on-error", "baseline-before-ack", "traffic-before-sync", "prefix-cache"],
)
def test_a_broken_part_is_caught(parts: Parts, faults: list[PlannedFault], law: str) -> None:
    report = run_broken(parts, *faults)
    assert law in {violation.split()[0].rstrip(":") for violation in report.violations}, report.violations
