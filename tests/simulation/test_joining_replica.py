"""A third replica that is added to a run that lives: the others do not feel it, and it serves what was published."""

from __future__ import annotations

from paceline.core.config import build_config
from paceline.core.events import Event, GenerationWindow, ReplicaChanged, SyncCompleted, SyncConfirmed
from paceline.core.waits import Waits
from paceline.runtime.supervision import Supervisor
from paceline.testing.fault_plan import PlannedFault
from paceline.testing.simulation import OTHER_ROLES, Simulation, SimulationReport
from paceline.testing.virtual_clock import VirtualClock, run_virtual

ADDED_AFTER = 5
VERSIONS = 60


def run(*, adding: int, faults: list[PlannedFault] | None = None) -> SimulationReport:
    """One run; `adding` replicas are added once so many versions are published."""
    config = build_config(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"trigger_parameter_sync_step": 1},
            "rollout": {
                "n": 2,
                "total_rollout_steps": 4 * VERSIONS,
                "max_num_seqs": 4,
                "exchange_timeout_seconds": 2.0,
                "max_replica_restarts": 5,
            },
            "checkpoint_engine": {"sync_timeout_seconds": 2.0},
            "data": {"max_response_length": 8},
            "trainer": {"test_freq": 0, "stall_timeout_seconds": 60.0},
        }
    )

    async def main(clock: VirtualClock) -> SimulationReport:
        simulation = Simulation(11, clock, config=config, faults=faults or [])
        supervisor = Supervisor(
            runtime=simulation,
            replica_roles=simulation.replica_roles,
            other_roles=OTHER_ROLES,
            max_restarts=5,
            waits=Waits(who="driver", clock=clock, events=simulation.checker),
            on_started=lambda: None,
        )

        def watch(event: Event) -> None:
            if isinstance(event, SyncCompleted) and simulation.checker.syncs == ADDED_AFTER:
                for _ in range(adding):
                    supervisor.add_replica()

        simulation.checker.watchers.append(watch)

        async def supervise(_: Simulation) -> None:
            await supervisor.run()

        return await simulation.run(supervise)

    report = run_virtual(main)
    assert (report.violations, report.error) == ([], "")
    return report


def pauses(report: SimulationReport, replica: str) -> list[float]:
    return [e.pause_seconds for e in report.events if isinstance(e, SyncConfirmed) and e.replica == replica]


def states(report: SimulationReport, replica: str) -> list[str]:
    return [e.state for e in report.events if isinstance(e, ReplicaChanged) and e.replica == replica]


def test_the_others_pause_as_before_and_are_neither_lost_nor_fenced() -> None:
    alone, joined = run(adding=0), run(adding=1)
    for replica in ("replica-0", "replica-1"):
        assert len(pauses(joined, replica)) == VERSIONS + 1
        assert max(pauses(joined, replica)) <= max(pauses(alone, replica))
        assert states(joined, replica) == ["joining", "ready"]


def test_it_is_ready_after_its_first_confirmation_and_then_gets_its_share() -> None:
    report = run(adding=1)
    assert states(report, "replica-2") == ["joining", "ready"]
    mine = [e for e in report.events if getattr(e, "replica", "") == "replica-2"]
    kinds = [type(event) for event in mine]
    ready = next(i for i, e in enumerate(mine) if isinstance(e, ReplicaChanged) and e.state == "ready")
    assert kinds.index(SyncConfirmed) < ready
    assert all(not isinstance(event, GenerationWindow) for event in mine[:ready])
    made = {
        name: sum(e.tokens for e in report.events if isinstance(e, GenerationWindow) and e.replica == name)
        for name in ("replica-0", "replica-1", "replica-2")
    }
    assert made["replica-2"] > made["replica-0"] / 4
    completed = [event for event in report.events if isinstance(event, SyncCompleted)]
    assert {"replica-0", "replica-1", "replica-2"} == set(completed[-1].pauses)
    assert all(event.verified and not event.fenced for event in completed[-5:])


def test_one_that_is_slow_to_join_costs_the_others_nothing() -> None:
    report = run(adding=1, faults=[PlannedFault("join", "delay", "before", call=1, seconds=1.0)])
    assert states(report, "replica-2")[-1] == "ready"
    for replica in ("replica-0", "replica-1"):
        assert states(report, replica) == ["joining", "ready"]


def test_several_at_once_join_one_after_another() -> None:
    report = run(adding=3)
    completed = [event for event in report.events if isinstance(event, SyncCompleted)]
    assert len(completed[-1].pauses) == 5
