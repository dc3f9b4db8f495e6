"""The trainer's side of validations in whole runs: alive, dead, standing still. Training and syncs do not feel it."""

from __future__ import annotations

from collections import Counter

from paceline.core.config import Config, build_config
from paceline.core.events import (
    Event,
    SyncCompleted,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
    ValidationStarted,
)
from paceline.core.ports import VALIDATOR
from paceline.testing.fault_plan import PlannedFault
from paceline.testing.simulation import Simulation, SimulationReport
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.simulation.supervised import supervise

VERSIONS = 40


def shared_config(updates: int = VERSIONS) -> Config:
    """A sync after each update, a validation of each fourth version, two problems for two replicas and one for it."""
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": 2},
            "async_training": {"trigger_parameter_sync_step": 1, "use_trainer_do_validate": True},
            "rollout": {"n": 2, "total_rollout_steps": 2 * updates, "max_num_seqs": 4, "exchange_timeout_seconds": 2.0},
            "checkpoint_engine": {"sync_timeout_seconds": 2.0},
            "data": {"max_response_length": 6},
            "trainer": {"test_freq": 4, "stall_timeout_seconds": 6.0},
        }
    )


def run(*faults: PlannedFault, dies_after: int | None = None) -> SimulationReport:
    """One run; `dies_after`: the validator is killed once so many versions are published."""

    async def main(clock: VirtualClock) -> SimulationReport:
        simulation = Simulation(3, clock, config=shared_config(), faults=list(faults))

        def watch(event: Event) -> None:
            if isinstance(event, SyncCompleted) and simulation.checker.syncs == dies_after:
                simulation.kill(VALIDATOR)

        simulation.checker.watchers.append(watch)
        return await simulation.run(supervise)

    report = run_virtual(main)
    assert (report.violations, report.error) == ([], "")
    return report


def finished(report: SimulationReport) -> list[ValidationFinished]:
    """All records; none was skipped, and no version has two."""
    assert not [event for event in report.events if isinstance(event, ValidationSkipped)]
    found = [event for event in report.events if isinstance(event, ValidationFinished)]
    assert set(Counter(event.version for event in found).values()) == {1}
    assert {event.problems for event in found} == {3}
    return found


def test_it_does_its_share_of_every_validation() -> None:
    report = run()
    records = finished(report)
    assert len(records) == VERSIONS // 4 + 1
    assert {(record.by_trainer, record.trainer_error) for record in records} == {(1, "")}


def test_after_its_death_the_replicas_do_all_and_every_record_says_so() -> None:
    report = run(dies_after=14)
    records = finished(report)
    assert len(records) == VERSIONS // 4 + 1
    by_trainer = [record.by_trainer for record in records]
    assert by_trainer == sorted(by_trainer, reverse=True)
    assert {0, 1} == set(by_trainer)
    assert all("validator died" in record.trainer_error for record in records if record.by_trainer == 0)


def test_while_it_stands_still_versions_are_trained_and_published_and_then_it_is_ended() -> None:
    report = run(PlannedFault("share", "hang", "before", call=2))
    records = [event for event in report.events if isinstance(event, ValidationFinished)]
    silent = next(record for record in records if "did not answer" in record.trainer_error)
    began = next(
        i for i, e in enumerate(report.events) if isinstance(e, ValidationStarted) and e.version == silent.version
    )
    meanwhile = report.events[began : report.events.index(silent)]
    assert sum(isinstance(event, SyncCompleted) for event in meanwhile) >= 2
    assert sum(isinstance(event, TrainStep) for event in meanwhile) >= 2
    after = [record for record in records if record.version > silent.version]
    assert all("died" in record.trainer_error for record in after)


def test_a_process_that_is_held_in_its_engine_loses_the_lease_with_its_end() -> None:
    """Without its end the lease would take an arena from every later sync."""
    report = run(PlannedFault("bind", "hang", "before", call=5))  # after two swaps and two pins
    records = [event for event in report.events if isinstance(event, ValidationFinished)]
    assert "did not answer" in records[0].trainer_error
    assert report.syncs == VERSIONS + 1
