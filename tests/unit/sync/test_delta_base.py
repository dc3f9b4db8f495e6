"""Against what a delta is made, and who gets none: the manager's part, and what a sync reports of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    PublishCommand,
    PublishReport,
    StageCommand,
    StageReport,
)
from paceline.core.config import build_config
from paceline.core.errors import SyncError
from paceline.core.events import SyncCompleted
from paceline.core.manifest import DeltaRecord, Published
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


class DeltaTrainer(RecordingTrainer):
    """Publishes a delta of 2 bytes against the base that it was told, where it was told one."""

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.bases: list[int | None] = []

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        self.bases.append(command.base_version)
        return await super().capture_weights(command)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        report = await super().publish_weights(command)
        manifest, base = report.published.manifest, self.bases[-1]
        if base is not None:
            manifest = replace(manifest, delta=DeltaRecord(base, "d", 2, 1, 4, "small", "arena-0"))
        return replace(report, published=Published(manifest, encode_seconds=0.5, changed_share=0.25))


class DeltaReplica(RecordingReplica):
    """Takes the delta where it serves its base; `fail_on` is a version that it cannot stage."""

    def __init__(self, log: CallLog, replica_id: str) -> None:
        super().__init__(log, replica_id)
        self.serves: int | None = None
        self.offered: list[bool] = []
        self.fail_on: int | None = None

    async def stage(self, command: StageCommand) -> StageReport:
        manifest = command.manifest
        if manifest.version == self.fail_on:
            raise SyncError("boom")
        self.offered.append(manifest.delta is not None)
        base = self.serves
        self.serves = manifest.version
        report = await super().stage(command)
        if manifest.delta is not None and manifest.delta.base_version == base:
            return replace(report, bytes=manifest.delta.nbytes, base_version=base)
        return replace(report, bytes=manifest.total_bytes)


class Rig:
    def __init__(self, clock: VirtualClock) -> None:
        self.log, self.events, self.clock = CallLog(), RecordingEvents(), clock
        self.trainer = DeltaTrainer(self.log)
        self.replicas = [DeltaReplica(self.log, f"replica-{i}") for i in range(2)]
        self.synchronizer = ParameterSynchronizer(
            build_config({"checkpoint_engine": {"sync_timeout_seconds": 2.0}}),
            self.trainer,
            RecordingRollouter(self.log, self.replicas),
            RecordingQueue(self.log),
            clock=clock,
            events=self.events,
        )

    def completed(self) -> SyncCompleted:
        return self.events.of(SyncCompleted)[-1]


def with_rig(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(200):
            await scenario(Rig(clock))

    run_virtual(main)


def test_the_base_is_the_newest_version_that_a_replica_confirmed() -> None:
    async def scenario(rig: Rig) -> None:
        for version in (1, 2):
            await rig.synchronizer.sync_weights(version)
        for replica in rig.replicas:
            replica.fail_on = 3
        with pytest.raises(SyncError):
            await rig.synchronizer.sync_weights(3)
        await rig.synchronizer.sync_weights(4)
        assert rig.trainer.bases == [None, 1, 2, 2]  # 3 reached nobody

    with_rig(scenario)


def test_a_sync_reports_what_was_moved() -> None:
    async def scenario(rig: Rig) -> None:
        first = await rig.synchronizer.sync_weights(1)
        assert (first.mode, first.base_version, first.bytes, first.full_bytes) == ("full", None, 8, 8)
        second = await rig.synchronizer.sync_weights(2)
        assert (second.mode, second.base_version, second.bytes, second.full_bytes) == ("delta", 1, 2, 8)
        assert (second.changed_share, second.encode_seconds) == (0.25, 0.5)
        event = rig.completed()
        assert (event.mode, event.base_version, event.bytes, event.full_bytes) == ("delta", 1, 2, 8)
        assert (event.changed_share, event.encode_seconds) == (0.25, 0.5)
        assert set(event.phases) == {"capture", "encode", "stage", "swap", "publish"}

    with_rig(scenario)


def test_a_sync_in_which_one_replica_took_the_whole_version_is_no_delta() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.synchronizer.sync_weights(1)
        rig.replicas[1].serves = 0
        report = await rig.synchronizer.sync_weights(2)
        assert (report.mode, report.base_version, report.bytes) == ("full", None, 8)

    with_rig(scenario)


def test_who_failed_or_joins_late_is_offered_the_whole_version_alone() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.synchronizer.sync_weights(1)
        rig.replicas[1].fail_on = 2
        await rig.synchronizer.sync_weights(2)
        rig.replicas[1].fail_on = None
        late = DeltaReplica(rig.log, "replica-2")
        await rig.synchronizer.add_replicas([late])
        await rig.clock.sleep(10)
        assert rig.replicas[0].offered == [False, True]
        assert rig.replicas[1].offered == [False, False]
        assert late.offered == [False]
        assert rig.replicas[1].serves == late.serves == 2
        await rig.synchronizer.sync_weights(3)
        assert late.offered == [False, True]

    with_rig(scenario)
