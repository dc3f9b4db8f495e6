"""Fakes that write down what happens to them, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    ExchangeReply,
    ExchangeRequest,
    PublishCommand,
    PublishReport,
    QueueStatistics,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.events import Event
from paceline.core.manifest import Published, WeightManifest
from paceline.core.ports import ReplicaControl
from paceline.core.sample import Sample

if TYPE_CHECKING:
    import torch

E = TypeVar("E", bound=Event)


class RecordingEvents:
    """An event sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """All events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class RecordingRolloutLog:
    """A rollout log that keeps samples in memory."""

    def __init__(self) -> None:
        self.records: list[tuple[Sample, int, str]] = []

    def record(self, sample: Sample, version: int, fate: Literal["trained", "dropped", "failed"]) -> None:
        """Keep it."""
        self.records.append((sample, version, fate))

    def flush(self) -> None:
        """Nothing to write."""


class RecordingBoard:
    """A serving board that keeps (version, digest) in order."""

    def __init__(self) -> None:
        self.published: list[tuple[int, str]] = []
        self.served: Mapping[str, torch.Tensor] | None = None

    def publish(self, version: int, digest: str, manifest: WeightManifest, served: Mapping[str, torch.Tensor]) -> None:
        """Keep it, and what was served last."""
        self.published.append((version, digest))
        self.served = served

    def withdraw(self) -> None:
        """Nothing is served."""
        self.served = None


@dataclass(slots=True)
class CallLog:
    """One list of (part, method, arguments) shared by all recording parts of a test."""

    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def add(self, part: str, method: str, **arguments: Any) -> None:
        """Append one call."""
        self.calls.append((part, method, arguments))

    def names(self) -> list[str]:
        """`part.method` of every call, in order."""
        return [f"{part}.{method}" for part, method, _ in self.calls]


class RecordingTrainer:
    """`FullyAsyncTrainer` as the synchronizer sees it."""

    def __init__(self, log: CallLog, digest: str = "d") -> None:
        self._log = log
        self._digest = digest

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """Pretend to take a snapshot of 8 bytes."""
        self._log.add("trainer", "capture_weights", version=command.version)
        return CaptureReport(version=command.version, digest=self._digest, bytes=8, seconds=0.0, wait_seconds=0.0)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """Pretend to publish it."""
        self._log.add("trainer", "publish_weights", version=command.version)
        manifest = WeightManifest(
            version=command.version,
            tensors=(),
            aliases={},
            total_bytes=8,
            digest=self._digest,
            arena_id="arena-0",
            address="nowhere",
        )
        return PublishReport(published=Published(manifest), seconds=0.0)


class RecordingReplica:
    """A replica as the manager sees it; its swap records the barrier it stands for."""

    def __init__(self, log: CallLog, replica_id: str) -> None:
        self.log = log
        self._replica_id = replica_id
        self._digest = ""

    @property
    def replica_id(self) -> str:
        """Name of the replica."""
        return self._replica_id

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Nothing is ever finished here."""
        return ExchangeReply(batch=0, completions=[], running=0, waiting=0)

    async def stage(self, command: StageCommand) -> StageReport:
        """Record it; report the published digest as if it had been computed."""
        self.log.add(self._replica_id, "stage", version=command.manifest.version)
        self._digest = command.manifest.digest
        return StageReport(replica=self._replica_id, version=command.manifest.version, digest=self._digest, seconds=0.0)

    async def swap(self, command: SwapCommand) -> SwapReport:
        """Record pause, swap and resume, which a replica does as one step."""
        for method in ("pause", "swap", "resume"):
            self.log.add(self._replica_id, method, version=command.version)
        return SwapReport(replica=self._replica_id, version=command.version, digest=self._digest, pause_seconds=0.0)

    async def discard_staged(self, version: int) -> None:
        """Record it."""
        self.log.add(self._replica_id, "discard_staged", version=version)

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Record it."""
        self.log.add(self._replica_id, "pin", version=version)
        return True

    async def unpin(self, version: int) -> None:
        """Record it."""
        self.log.add(self._replica_id, "unpin", version=version)

    async def pause(self) -> None:
        """Record it."""
        self.log.add(self._replica_id, "pause")

    async def resume(self) -> None:
        """Record it."""
        self.log.add(self._replica_id, "resume")

    async def report(self) -> ReplicaReport:
        """A READY replica."""
        return ReplicaReport(replica=self._replica_id, state="ready", version=None, digest=self._digest)


class RecordingRollouter:
    """`FullyAsyncRollouter` as the synchronizer sees it."""

    def __init__(self, log: CallLog, replicas: Sequence[RecordingReplica]) -> None:
        self._log = log
        self._replicas = list(replicas)

    def get_rollout_wg(self) -> list[RecordingReplica]:
        """The replicas."""
        return self._replicas

    async def pause(self) -> None:
        """Record it."""
        self._log.add("rollouter", "pause")

    async def resume(self) -> None:
        """Record it."""
        self._log.add("rollouter", "resume")

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None:
        """Record it."""
        self._log.add(
            "rollouter",
            "update_param_version",
            version=version,
            validate=validate,
            global_steps=global_steps,
            use_trainer_do_validate=use_trainer_do_validate,
        )

    async def confirm_replicas(self, confirmed: Mapping[str, int], fenced: Mapping[str, str]) -> None:
        """Record it."""
        self._log.add("rollouter", "confirm_replicas", confirmed=dict(confirmed), fenced=dict(fenced))

    async def add_replica(self, replica: ReplicaControl) -> None:
        """Record it."""
        self._log.add("rollouter", "add_replica", replica=replica.replica_id)

    async def remove_replica(self, replica_id: str) -> None:
        """Record it."""
        self._log.add("rollouter", "remove_replica", replica=replica_id)

    async def lose_replica(self, replica_id: str, reason: str) -> None:
        """Record it."""
        self._log.add("rollouter", "lose_replica", replica=replica_id, reason=reason)

    async def save_checkpoint(self, local_global_step_folder: str) -> None:
        """Record it."""
        self._log.add("rollouter", "save_checkpoint", local_global_step_folder=local_global_step_folder)

    async def wait_validations(self) -> None:
        """Record it."""
        self._log.add("rollouter", "wait_validations")


class RecordingQueue:
    """`MessageQueue` as the synchronizer sees it."""

    def __init__(self, log: CallLog) -> None:
        self._log = log

    async def put_samples(self, items: Sequence[bytes]) -> int:
        """Record it."""
        self._log.add("queue", "put_samples", count=len(items))
        return 0

    async def get_samples(self, count: int, wait_seconds: float) -> tuple[list[bytes], int]:
        """Always empty."""
        return [], 0

    async def peek_samples(self) -> list[bytes]:
        """Always empty."""
        return []

    async def put_validate(self, result: bytes) -> None:
        """Record it."""
        self._log.add("queue", "put_validate")

    async def get_validate(self) -> bytes | None:
        """Always empty."""
        return None

    async def update_param_version(self, version: int) -> None:
        """Record it."""
        self._log.add("queue", "update_param_version", version=version)

    async def get_statistics(self) -> QueueStatistics:
        """All zero."""
        return QueueStatistics(size=0, capacity=1, put=0, taken=0, dropped={}, version=-1, closed=False)

    async def finish(self, producer: str) -> None:
        """Record it."""
        self._log.add("queue", "finish", producer=producer)

    async def fail(self, producer: str, error: str) -> None:
        """Record it."""
        self._log.add("queue", "fail", producer=producer, error=error)
