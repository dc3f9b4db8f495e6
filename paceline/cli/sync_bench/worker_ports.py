"""The trainer and the replicas in other processes, as the ports that the checkpoint engine manager is handed."""

from __future__ import annotations

from typing import Protocol, TypeVar

from msgspec.structs import replace

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    ExchangeReply,
    ExchangeRequest,
    PublishCommand,
    PublishReport,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.errors import SyncError
from paceline.core.events import Event
from paceline.core.manifest import WeightManifest

R = TypeVar("R", bound=m.Reply)


class Worker(Protocol):
    """A process of the benchmark: one on its own (`frames.WorkerProcess`) or an actor (`ray_workers.RayWorker`)."""

    name: str

    @property
    def pid(self) -> int: ...

    async def call(self, request: m.Request, reply: type[R], seconds: float = CALL_SECONDS) -> R: ...

    async def stop(self) -> None: ...


class NoEvents:
    """Implements `core.events.EventSink`; nobody reads the events of a benchmark."""

    def emit(self, event: Event) -> None:
        """Drop it."""


class RemoteTrainer:
    """Implements `core.ports.TrainerControl`.

    `base` is the version that every replica serves; a manager that has moved none yet does not know it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.base: int | None = None

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """See `TrainerControl`."""
        command = replace(command, base_version=self.base)
        return (await self._worker.call(m.Capture(command), m.Captured)).report

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """See `TrainerControl`."""
        return (await self._worker.call(m.Publish(command), m.Publication)).report


class RemoteReplica:
    """Implements `core.ports.ReplicaControl`, as far as a sync goes; `worker` takes the benchmark's own requests."""

    def __init__(self, worker: Worker) -> None:
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
