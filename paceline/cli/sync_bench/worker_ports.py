"""The trainer and the replicas in other processes, as the ports that the checkpoint engine manager is handed."""

from __future__ import annotations

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import WorkerProcess
from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    ExchangeReply,
    ExchangeRequest,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.errors import SyncError
from paceline.core.events import Event
from paceline.core.manifest import WeightManifest


class NoEvents:
    """Implements `core.events.EventSink`; nobody reads the events of a benchmark."""

    def emit(self, event: Event) -> None:
        """Drop it."""


class RemoteTrainer:
    """Implements `core.ports.TrainerControl`."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """See `TrainerControl`."""
        return (await self._worker.call(m.Capture(command), m.Captured)).report


class RemoteReplica:
    """Implements `core.ports.ReplicaControl`, as far as a sync goes; `worker` takes the benchmark's own requests."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker

    @property
    def replica_id(self) -> str:
        """Its name."""
        return self.worker.name

    async def stage(self, command: StageCommand) -> StageReport:
        """See `ReplicaControl`."""
        return (await self.worker.call(m.Stage(command), m.Staged)).report

    async def swap(self, command: SwapCommand) -> SwapReport:
        """See `ReplicaControl`."""
        return (await self.worker.call(m.Swap(command), m.Swapped)).report

    async def discard_staged(self, version: int) -> None:
        """See `ReplicaControl`."""
        await self.worker.call(m.Discard(version), m.Done)

    async def pause(self) -> None:
        """See `ReplicaControl`."""
        await self.worker.call(m.Pause(), m.Done)

    async def resume(self) -> None:
        """See `ReplicaControl`."""
        await self.worker.call(m.Resume(), m.Done)

    async def take(self, manifest: WeightManifest, deadline_wall: float) -> None:
        """Stage and swap outside a measured sync."""
        await self.stage(StageCommand(manifest=manifest, sync_id=0, deadline_wall=deadline_wall))
        await self.swap(SwapCommand(version=manifest.version, sync_id=0, deadline_wall=deadline_wall))

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Not here: the replica generates for itself."""
        raise SyncError(f"{self.replica_id} takes no requests from outside")

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Not here."""
        raise SyncError(f"{self.replica_id} pins nothing")

    async def unpin(self, version: int) -> None:
        """Not here."""
        raise SyncError(f"{self.replica_id} pins nothing")

    async def report(self) -> ReplicaReport:
        """Not here."""
        raise SyncError(f"{self.replica_id} is asked for no report")
