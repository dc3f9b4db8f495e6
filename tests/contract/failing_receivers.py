"""A whole sync over real checkpoint engines, with receivers that fail while they stage, each in its own way.

The trainer, the manager and every replica's transaction are the real ones; a replica stages in a thread of its own, as
its host does. The deadline of a sync is long, and leaped over where it is to pass.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

import torch

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
from paceline.core.config import build_config
from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.core.weight_ports import StagedWeights, WeightReceiver, WeightSender
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.marker_model import MarkerEngine
from paceline.testing.recording import RecordingBoard, RecordingEvents
from tests.leaping_clock import LeapingClock

TIMEOUT_SECONDS = 60.0
_WIDTH = 100_000


class Failure(Protocol):
    """What goes wrong when a version is staged; returns for a receiver to go on as if nothing was."""

    def __call__(self, manifest: WeightManifest, receiver: WeightReceiver) -> None: ...


class FailingReceiver:
    """Implements `WeightReceiver` over another one; the failure happens once, at the version it is armed for."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._failures: dict[int, Failure] = {}

    def arm(self, n: int, failure: Failure) -> None:
        self._failures[n] = failure

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> StagedWeights:
        failure = self._failures.pop(Version.unpack(manifest.version).n, None)
        if failure is not None:
            failure(manifest, self._receiver)
        return self._receiver.stage(manifest)

    def close(self) -> None:
        self._receiver.close()


class Boom:
    """Raises what no code of ours raises."""

    def __call__(self, manifest: WeightManifest, receiver: WeightReceiver) -> None:
        raise ValueError("boom in bucket 2")


class Blocks:
    """Does not come back until it is let go, long after everybody gave up."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def __call__(self, manifest: WeightManifest, receiver: WeightReceiver) -> None:
        self.begun.set()
        assert self.let_go.wait(60)
        self.ended.set()


class TrainerSide:
    """Implements `TrainerControl` over a sender; every version has other values."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._marker = torch.zeros(1, dtype=torch.int64)
        self._weight = torch.zeros(_WIDTH)

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        self._marker += 1
        self._weight += 1
        named = [("marker", self._marker), ("weight", self._weight), ("head", self._weight)]
        captured = self._sender.capture(named, command.version)
        return CaptureReport(captured.version, captured.digest, captured.total_bytes, 0.0, 0.0)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        return PublishReport(self._sender.publish(), 0.0)


class ReplicaSide:
    """Implements `ReplicaControl` as far as a sync goes."""

    def __init__(self, name: str, receiver: WeightReceiver, clock: LeapingClock) -> None:
        self.replica_id = name
        self.staged: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.receiver = FailingReceiver(receiver)
        self.engine = MarkerEngine(width=_WIDTH, places=4)
        self.transaction = WeightTransaction(
            replica_id=name, life=1, receiver=self.receiver, board=RecordingBoard(), clock=clock
        )

    async def stage(self, command: StageCommand) -> StageReport:
        # A thread that nobody waits for: one that hangs must not keep the loop from ending.
        done: asyncio.Future[StageReport] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                report = self.transaction.stage(command, self.engine)
            except Exception as error:  # whatever it is, it is the caller's
                _tell(loop, done, lambda error=error: done.set_exception(error))  # type: ignore[misc]
            else:
                _tell(loop, done, lambda: done.set_result(report))

        threading.Thread(target=run, name=f"stage-{self.replica_id}", daemon=True).start()
        report = await done
        self.staged[report.version].set()
        return report

    async def swap(self, command: SwapCommand) -> SwapReport:
        previous = self.transaction.swap(command, self.engine)
        if previous is not None:
            previous.release()
        return SwapReport(self.replica_id, command.version, self.transaction.report().digest, 0.0)

    async def discard_staged(self, version: int) -> None:
        self.transaction.discard(version)

    async def report(self) -> ReplicaReport:
        return self.transaction.report()

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        raise SyncError("nobody generates here")

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        raise SyncError("nobody validates here")

    async def unpin(self, version: int) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[StageReport], call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if done.done() else call())


class SyncRig:
    """A trainer and replicas over both ends of one engine."""

    def __init__(self, sender: WeightSender, receivers: dict[str, WeightReceiver]) -> None:
        config = build_config({"checkpoint_engine": {"sync_timeout_seconds": TIMEOUT_SECONDS}})
        self._clock = LeapingClock()
        self.replicas = {name: ReplicaSide(name, receiver, self._clock) for name, receiver in receivers.items()}
        self._manager = CheckpointEngineManager(
            config,
            TrainerSide(sender),
            list(self.replicas.values()),
            clock=self._clock,
            events=RecordingEvents(),
        )

    async def sync(self, n: int) -> WeightUpdate:
        """One version to all; a sync that is not over after twice its time is an error of its own."""
        async with asyncio.timeout(2 * TIMEOUT_SECONDS):
            return await self._manager.update_weights(n, version=Version(1, n).packed)

    async def sync_past_the_deadline(self, n: int, hanging: str, begun: threading.Event) -> WeightUpdate:
        """A sync in which one hangs: the deadline comes when it does and the others have staged."""
        syncing = asyncio.ensure_future(self.sync(n))
        others = [replica for name, replica in self.replicas.items() if name != hanging]
        assert await asyncio.to_thread(begun.wait, TIMEOUT_SECONDS)
        staged = asyncio.gather(*(replica.staged[Version(1, n).packed].wait() for replica in others))
        waited: set[asyncio.Future[Any]] = {syncing, staged}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        self._clock.leap(TIMEOUT_SECONDS + 1)
        return await syncing

    async def catch_up(self, name: str) -> None:
        """A replica that was fenced takes the newest version."""
        async with asyncio.timeout(2 * TIMEOUT_SECONDS):
            await self._manager.catch_up(name)

    def markers(self) -> dict[str, int]:
        """What each replica really serves."""
        return {name: replica.engine.marker for name, replica in self.replicas.items()}

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """On the clock of this rig."""
        self._clock.run(scenario)

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.engine.unbind()
            replica.transaction.close()


def stage_threads() -> list[threading.Thread]:
    """Living threads that stage."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]


def end_of_staging() -> None:
    """Return when no thread stages any more."""
    for thread in stage_threads():
        thread.join(60)
