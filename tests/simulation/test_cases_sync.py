"""Cases C10, C11, C12 and C22: crashes, races and interruptions of a sync, and replicas that die and return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.core.commands import CaptureCommand, CaptureReport, SyncReport
from paceline.core.config import Config, build_config
from paceline.core.errors import PacelineError, Superseded, SyncError
from paceline.core.events import (
    Event,
    ReplicaChanged,
    SampleTrained,
    SyncAborted,
    SyncCaptured,
    SyncCompleted,
    SyncConfirmed,
)
from paceline.core.version import Version
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.testing.fault_plan import FaultKind, Moment, Phase, PlannedFault
from paceline.testing.recording import CallLog, RecordingEvents, RecordingQueue, RecordingReplica, RecordingRollouter
from paceline.testing.recording import RecordingTrainer as Trainer
from paceline.testing.simulation import Simulation, SimulationReport
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.simulation.supervised import supervise


def config(replicas: int = 3, versions: int = 9, restarts: int = 9) -> Config:
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 1},
            "rollout": {
                "n": 2,
                "num_replicas": replicas,
                "total_rollout_steps": 4 * versions,
                "max_num_seqs": 8,
                "exchange_timeout_seconds": 2.0,
                "max_replica_restarts": restarts,
                "replica_return_seconds": 5.0,
            },
            "checkpoint_engine": {"sync_timeout_seconds": 2.0},
            "data": {"max_response_length": 8},
            "trainer": {"stall_timeout_seconds": 60.0},
        }
    )


def simulate(
    *faults: PlannedFault,
    chosen: Config | None = None,
    when: Callable[[Simulation, Event], None] = lambda simulation, event: None,
) -> SimulationReport:
    async def main(clock: VirtualClock) -> SimulationReport:
        simulation = Simulation(3, clock, config=chosen or config(), faults=list(faults))
        simulation.checker.watchers.append(lambda event: when(simulation, event))
        return await simulation.run(supervise)

    return run_virtual(main)


def of(report: SimulationReport, kind: type[Event]) -> list[Any]:
    return [event for event in report.events if isinstance(event, kind)]


def n_of(packed: int) -> int:
    return Version.unpack(packed).n


def trained_once(report: SimulationReport, samples: int) -> bool:
    ids = [sample for event in of(report, SampleTrained) for sample in event.ids]
    return len(ids) == len(set(ids)) == samples


# -- C10: a crash between two steps of a sync ------------------------------------------------------------------------


def test_c10_a_trainer_that_dies_after_its_counter_rose_publishes_nothing() -> None:
    def kill_the_trainer(simulation: Simulation, event: Event) -> None:
        if isinstance(event, SyncCaptured) and n_of(event.version) == 6:
            simulation.kill("trainer")

    report = simulate(when=kill_the_trainer)
    assert report.error.startswith("WorkerDied: trainer died")
    assert report.violations == []  # no token, no replica and no queue says 6 while a replica is not whole
    last = max(n_of(event.version) for event in of(report, SyncCompleted))
    sixth = {event.replica for event in of(report, SyncConfirmed) if n_of(event.version) == 6}
    assert (last, len(sixth)) in ((5, 0), (6, 3))


def test_c10_a_replica_that_dies_while_it_fetches_stays_out_and_the_others_go_on() -> None:
    report = simulate(PlannedFault("fetch", "kill", "before", 3 * 6 + 1))
    assert (report.error, report.violations) == ("", [])
    (lost,) = [event.replica for event in of(report, ReplicaChanged) if event.state == "lost"]
    sixth = [event.replica for event in of(report, SyncConfirmed) if n_of(event.version) == 6]
    assert lost not in sixth
    assert len(sixth) == 2
    assert trained_once(report, 36)


def test_c10_a_sync_that_fails_on_all_replicas_leaves_the_label_and_the_next_one_works() -> None:
    at = [PlannedFault("fetch", "raise", "before", call) for call in (19, 20, 21)]
    report = simulate(*at)
    assert (report.error, report.violations) == ("", [])
    assert [n_of(event.version) for event in of(report, SyncAborted)] == [6]
    completed = [n_of(event.version) for event in of(report, SyncCompleted)]
    assert completed[:8] == [0, 1, 2, 3, 4, 5, 7, 8]


def test_c10_a_version_that_is_not_staged_cannot_be_finished() -> None:
    """The reply of a stage is lost, so no swap comes. (A swap without its stage is refused: see `tests/unit/sync`.)"""
    report = simulate(PlannedFault("stage", "hang", "after", 3 * 6 + 1))
    assert (report.error, report.violations) == ("", [])
    sixth = [event.replica for event in of(report, SyncConfirmed) if n_of(event.version) == 6]
    assert len(sixth) >= 2
    (event,) = [event for event in of(report, SyncCompleted) if n_of(event.version) == 6]
    assert len(event.fenced) == 1


# -- C11: syncs that race --------------------------------------------------------------------------------------------


class SlowTrainer(Trainer):
    """Its snapshot of version n takes the given time."""

    def __init__(self, log: CallLog, clock: VirtualClock, seconds: dict[int, float]) -> None:
        super().__init__(log)
        self._clock = clock
        self._seconds = seconds

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        await self._clock.sleep(self._seconds.get(command.version, 0.0))
        return await super().capture_weights(command)


class Race:
    """A synchronizer over recording parts, and what came of each call."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.log = CallLog()
        replicas = [RecordingReplica(self.log, f"replica-{i}") for i in range(2)]
        self.synchronizer = ParameterSynchronizer(
            build_config({}),
            SlowTrainer(self.log, clock, {6: 0.6, 7: 0.3, 8: 0.1}),
            RecordingRollouter(self.log, replicas),
            RecordingQueue(self.log),
            clock=clock,
            events=RecordingEvents(),
        )

    def call(self, version: int) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.synchronizer.sync_weights(version))

    def published(self) -> list[int]:
        return [call[2]["version"] for call in self.log.calls if call[:2] == ("queue", "update_param_version")]

    def served(self) -> set[int]:
        swaps = [call for call in self.log.calls if call[1] == "swap"]
        return {max(call[2]["version"] for call in swaps if call[0] == name) for name in ("replica-0", "replica-1")}


def race(scenario: Callable[[Race], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(10):
            await scenario(Race(clock))

    run_virtual(main)


@pytest.mark.parametrize("order", [(6, 7, 8), (8, 7, 6), (7, 8, 6)])
def test_c11_three_syncs_at_once_end_at_the_newest_and_each_caller_gets_an_answer(order: tuple[int, ...]) -> None:
    async def scenario(rig: Race) -> None:
        answers = await asyncio.gather(*(rig.call(version) for version in order), return_exceptions=True)
        published = rig.published()
        assert published == sorted(set(published))
        assert published[-1] == 8
        assert rig.served() == {8}
        assert rig.synchronizer.get_current_param_version() == 8
        for version, answer in zip(order, answers, strict=True):
            own = isinstance(answer, SyncReport) and answer.version == version
            assert own if version in published else isinstance(answer, Superseded)

    race(scenario)


def test_c11_a_cancelled_caller_leaves_no_lock_and_no_half_version() -> None:
    async def scenario(rig: Race) -> None:
        six, seven, eight = rig.call(6), rig.call(7), rig.call(8)
        await rig.clock.sleep(0.05)
        seven.cancel()
        assert (await six).version == 6
        assert (await eight).version == 8
        assert seven.cancelled()
        assert rig.published() == [6, 8]
        with pytest.raises(Superseded):
            await rig.call(7)

    race(scenario)


def test_c11_a_caller_cancelled_in_the_middle_of_its_sync_leaves_a_whole_version() -> None:
    async def scenario(rig: Race) -> None:
        six = rig.call(6)
        await rig.clock.sleep(0.3)
        six.cancel()
        await rig.clock.sleep(1.0)
        assert rig.published() == [6]
        assert rig.served() == {6}
        assert (await rig.call(7)).version == 7

    race(scenario)


# -- C12: an interrupted sync never leaves the fleet paused ----------------------------------------------------------

C12_PHASES: tuple[Phase, ...] = (
    "capture",
    "fetch",
    "swap",
    "bind",
    "prove",
    "queue_version",
    "rollout_version",
    "resume",
)


@pytest.mark.parametrize("phase", C12_PHASES)
@pytest.mark.parametrize("kind", ["raise", "cancel", "hang"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_c12_after_any_interruption_the_fleet_runs_and_the_next_sync_works(
    phase: Phase, kind: FaultKind, moment: Moment
) -> None:
    report = simulate(PlannedFault(phase, kind, moment, 1 if phase == "resume" else 2))
    assert len(report.landed) == 1
    assert (report.error, report.violations) == ("", [])  # a replica left paused would be one
    assert len(of(report, SyncCompleted)) >= 9
    assert trained_once(report, 36)


def test_c12_an_error_that_does_not_pass_ends_the_run_with_its_name() -> None:
    always = [PlannedFault("queue_version", "raise", "before", call) for call in (3, 4, 5)]

    async def main(clock: VirtualClock) -> SimulationReport:
        simulation = Simulation(3, clock, config=config(), faults=always)
        return await simulation.run(supervise)

    report = run_virtual(main)
    assert report.error == "InjectedFault: injected: raise before queue_version #5"
    assert [event.phase for event in of(report, SyncAborted)] == ["publish"] * 3


# -- C22: replicas die in the middle of a transfer and come back -----------------------------------------------------


def test_c22_the_others_are_on_one_version_and_the_dead_one_returns() -> None:
    report = simulate(PlannedFault("fetch", "kill", "before", 3 * 3 + 2), chosen=config(versions=40))
    assert (report.error, report.violations) == ("", [])
    (third,) = [event for event in of(report, SyncCompleted) if n_of(event.version) == 3]
    assert third.seconds < 10
    confirmed = [event.replica for event in of(report, SyncConfirmed) if n_of(event.version) == 3]
    assert len(confirmed) >= 2
    states = [(event.replica, event.state) for event in of(report, ReplicaChanged)]
    (lost,) = [replica for replica, state in states if state == "lost"]
    after = states[states.index((lost, "lost")) :]
    assert [state for replica, state in after if replica == lost][:2] == ["lost", "joining"]
    last = {event.replica: event.digest for event in of(report, SyncConfirmed)}
    assert last.keys() == {"replica-0", "replica-1", "replica-2"}
    assert len(set(last.values())) == 1
    assert trained_once(report, 160)


def test_c22_with_no_replica_left_the_run_ends_with_a_clear_error() -> None:
    def kill_all(simulation: Simulation, event: Event) -> None:
        if isinstance(event, SyncCompleted) and n_of(event.version) == 3:
            for role in simulation.replica_roles:
                simulation.kill(role)

    report = simulate(chosen=config(restarts=0), when=kill_all)
    assert "no replica is left" in report.error
    assert [line for line in report.violations if not line.startswith("L2: the run ended")] == []
    assert report.virtual_seconds < 30


def test_c22_all_replicas_die_at_once_and_return() -> None:
    def kill_all(simulation: Simulation, event: Event) -> None:
        if isinstance(event, SyncCompleted) and n_of(event.version) == 3:
            for role in simulation.replica_roles:
                simulation.kill(role)

    report = simulate(when=kill_all)
    assert (report.error, report.violations) == ("", [])
    assert trained_once(report, 36)


def test_an_error_class_of_the_sync_tree_reaches_the_caller() -> None:
    assert issubclass(Superseded, SyncError)
    assert issubclass(SyncError, PacelineError)
