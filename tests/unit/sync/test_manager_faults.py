"""The manager when replicas fail, die, return or answer late; the synchronizer when there is nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paceline.core.commands import ReplicaReport, StageCommand, StageReport, SwapCommand, SwapReport
from paceline.core.config import build_config
from paceline.core.errors import DeadlineExceeded, SyncError, WorkerDied
from paceline.core.events import CatchUpFailed, SyncAborted, SyncConfirmed, ZombiesRefused
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.testing.recording import (
    CallLog,
    RecordingEvents,
    RecordingQueue,
    RecordingReplica,
    RecordingRollouter,
    RecordingTrainer,
)
from paceline.testing.virtual_clock import VirtualClock, run_virtual


class ScriptedReplica(RecordingReplica):
    """Raises, stalls or calls back when a version is staged or swapped; `served` is what its report says."""

    def __init__(self, log: CallLog, replica_id: str) -> None:
        super().__init__(log, replica_id)
        self.on_stage: Callable[[int], Awaitable[None]] | None = None
        self.on_swap: Callable[[int], Awaitable[None]] | None = None
        self.served: int | None = None

    async def stage(self, command: StageCommand) -> StageReport:
        if self.on_stage is not None:
            await self.on_stage(command.manifest.version)
        return await super().stage(command)

    async def swap(self, command: SwapCommand) -> SwapReport:
        report = await super().swap(command)
        self.served = command.version
        if self.on_swap is not None:
            await self.on_swap(command.version)
        return report

    async def report(self) -> ReplicaReport:
        return ReplicaReport(replica=self.replica_id, state="ready", version=self.served, digest="d")


class Rig:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.log = CallLog()
        self.events = RecordingEvents()
        self.replicas = [ScriptedReplica(self.log, f"replica-{i}") for i in range(2)]
        config = build_config(
            {"checkpoint_engine": {"sync_timeout_seconds": 2.0}, "rollout": {"replica_return_seconds": 20.0}}
        )
        trainer = RecordingTrainer(self.log)
        self.manager = CheckpointEngineManager(config, trainer, self.replicas, clock=clock, events=self.events)
        self.synchronizer = ParameterSynchronizer(
            config,
            trainer,
            RecordingRollouter(self.log, self.replicas),
            RecordingQueue(self.log),
            clock=clock,
            events=self.events,
        )


def with_rig(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(200):
            await scenario(Rig(clock))

    run_virtual(main)


def raising(error: BaseException) -> Callable[[int], Awaitable[None]]:
    async def act(version: int) -> None:
        raise error

    return act


def test_a_cancelled_call_to_one_replica_is_that_replicas_failure() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[1].on_stage = raising(asyncio.CancelledError())
        update = await rig.manager.update_weights(1)
        assert list(update.swapped) == ["replica-0"]
        assert update.fenced == {"replica-1": "the call to replica-1 was cancelled"}

    with_rig(scenario)


def test_a_replica_that_was_started_again_meanwhile_is_not_the_one_that_confirmed() -> None:
    async def scenario(rig: Rig) -> None:
        async def replace(version: int) -> None:
            rig.manager.add_replicas([ScriptedReplica(rig.log, "replica-1")])

        rig.replicas[1].on_swap = replace
        update = await rig.manager.update_weights(1)
        assert list(update.swapped) == ["replica-0"]
        assert rig.manager.fenced == {"replica-1": "has not confirmed a version yet"}
        assert [event.replica for event in rig.events.of(SyncConfirmed)] == ["replica-0"]
        (refused,) = rig.events.of(ZombiesRefused)
        assert (refused.replica, refused.confirmations) == ("replica-1", 1)

    with_rig(scenario)


def test_a_replica_that_left_meanwhile_does_not_break_the_sync() -> None:
    async def scenario(rig: Rig) -> None:
        async def leave(version: int) -> None:
            rig.manager.remove_replicas(["replica-1"])

        rig.replicas[1].on_stage = leave
        update = await rig.manager.update_weights(1)
        assert list(update.swapped) == ["replica-0"]
        assert update.fenced == {}

    with_rig(scenario)


def test_a_lost_confirmation_is_made_up_for_by_a_report() -> None:
    async def scenario(rig: Rig) -> None:
        async def never(version: int) -> None:
            await asyncio.Event().wait()

        rig.replicas[1].on_swap = never
        assert "did not answer" in (await rig.manager.update_weights(1)).fenced["replica-1"]
        stages = rig.log.names().count("replica-1.stage")
        assert await rig.manager.catch_up("replica-1") == 1
        assert rig.log.names().count("replica-1.stage") == stages
        assert rig.manager.fenced == {}

    with_rig(scenario)


def test_who_catches_up_during_a_sync_counts_only_with_the_newest_version() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[1].on_stage = raising(SyncError("once"))
        await rig.manager.update_weights(1)
        rig.replicas[1].on_stage = None

        async def slow(version: int) -> None:
            await rig.clock.sleep(1.0)

        rig.replicas[0].on_stage = slow
        catching_up = asyncio.ensure_future(rig.manager.catch_up("replica-1"))
        update = await rig.manager.update_weights(2)
        assert "replica-1" in update.fenced
        assert await catching_up == 2

    with_rig(scenario)


def test_a_replica_that_stands_still_is_given_up() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[1].on_stage = raising(SyncError("once"))
        await rig.manager.update_weights(1)

        async def never(version: int) -> None:
            await asyncio.Event().wait()

        rig.replicas[1].on_stage = never
        with pytest.raises(DeadlineExceeded, match="replica-1 did not answer"):
            await rig.manager.catch_up("replica-1")

    with_rig(scenario)


def test_the_rollouter_hears_of_a_replica_that_does_not_catch_up() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[1].on_stage = raising(WorkerDied("replica-1 died", "replica-1"))
        await rig.synchronizer.sync_weights(1)
        await rig.clock.sleep(5.0)
        assert [event.error for event in rig.events.of(CatchUpFailed)] == ["replica-1 died"]
        assert "rollouter.lose_replica" in rig.log.names()

    with_rig(scenario)


def test_with_nobody_left_a_sync_waits_for_a_replica() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.on_stage = raising(WorkerDied(f"{replica.replica_id} died", replica.replica_id))
        with pytest.raises(SyncError, match="replica-0 died; replica-1 died"):
            await rig.synchronizer.sync_weights(1)
        waiting = asyncio.ensure_future(rig.synchronizer.sync_weights(2))
        await rig.clock.sleep(5.0)
        assert not waiting.done()
        await rig.synchronizer.add_replicas([ScriptedReplica(rig.log, "replica-1")])
        assert (await waiting).confirmed == {"replica-1": 2}

    with_rig(scenario)


def test_with_nobody_left_for_long_a_sync_says_so() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.on_stage = raising(WorkerDied("gone", replica.replica_id))
        with pytest.raises(SyncError):
            await rig.synchronizer.sync_weights(1)
        with pytest.raises(DeadlineExceeded, match="waited 20 s for a replica"):
            await rig.synchronizer.sync_weights(2)

    with_rig(scenario)


def test_a_sync_whose_part_was_cancelled_is_aborted_with_an_error() -> None:
    async def scenario(rig: Rig) -> None:
        class CancelledQueue(RecordingQueue):
            async def update_param_version(self, version: int) -> None:
                raise asyncio.CancelledError

        synchronizer = ParameterSynchronizer(
            build_config({}),
            RecordingTrainer(rig.log),
            RecordingRollouter(rig.log, rig.replicas),
            CancelledQueue(rig.log),
            clock=rig.clock,
            events=rig.events,
        )
        with pytest.raises(SyncError, match="was cancelled in publish"):
            await synchronizer.sync_weights(1)
        assert [event.phase for event in rig.events.of(SyncAborted)] == ["publish"]

    with_rig(scenario)


def test_the_report_has_the_lag_of_publication() -> None:
    async def scenario(rig: Rig) -> None:
        async def slow(version: int) -> None:
            await rig.clock.sleep(0.5)

        rig.replicas[0].on_stage = slow
        report = await rig.synchronizer.sync_weights(1)
        assert report.publish_lag_seconds == pytest.approx(0.5)
        assert set(report.phases) == {"capture", "encode", "stage", "swap", "publish"}

    with_rig(scenario)
