"""A fleet of fake replicas under the real rollouter, message queue, batcher and synchronizer: the control plane alone.

Replicas make no tokens but time: a response is finished so many seconds after it came to its place. For measurements
of the loops (event-loop lag, samples per second, memory) on the real clock or the virtual one.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from dataclasses import dataclass

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
from paceline.core.config import Config
from paceline.core.errors import QueueClosed
from paceline.core.events import Event
from paceline.core.manifest import Published, WeightManifest
from paceline.core.ports import Clock
from paceline.core.sample import Completion, GenerationRequest
from paceline.core.version import Version
from paceline.message_queue import MessageQueue
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.testing.marker_task import EndlessPrompts, LengthReward, NumberDecoder
from paceline.train.batcher import Batcher

LIFE = 1
DIGEST = "d" * 32


class SilentEvents:
    """An event sink that keeps nothing but a count."""

    def __init__(self) -> None:
        self.count = 0

    def emit(self, event: Event) -> None:
        """Count it."""
        self.count += 1


class FakeReplica:
    """Implements `ReplicaControl`: `places` responses at a time, each of `tokens` tokens after about `seconds`."""

    def __init__(self, replica_id: str, *, places: int, tokens: int, seconds: float, clock: Clock) -> None:
        self._replica_id = replica_id
        self._places = places
        self._tokens = list(range(tokens))
        self._logprobs = [-1.0] * tokens
        self._seconds = seconds
        self._clock = clock
        self._rng = random.Random(replica_id)
        self._version = -1
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[tuple[float, str]] = []
        self._unacknowledged: deque[tuple[int, Completion]] = deque()
        self._batch = 0

    @property
    def replica_id(self) -> str:
        """Name of the replica."""
        return self._replica_id

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """New requests in, finished responses out."""
        while self._unacknowledged and self._unacknowledged[0][0] <= request.acknowledged:
            self._unacknowledged.popleft()
        self._waiting.extend(request.requests)
        self._move()
        if self._running:
            until = self._running[0][0] - self._clock.now()
            await self._clock.sleep(min(request.wait_seconds, max(until, 0.005)))
        else:
            await self._clock.sleep(request.wait_seconds)
        self._move()
        return ExchangeReply(
            batch=self._batch,
            completions=[completion for _, completion in self._unacknowledged],
            running=len(self._running),
            waiting=len(self._waiting),
        )

    def _move(self) -> None:
        now = self._clock.now()
        while self._running and self._running[0][0] <= now:
            _, request_id = heapq.heappop(self._running)
            self._batch += 1
            versions = [self._version] * len(self._tokens)
            done = Completion(request_id, self._tokens, self._logprobs, versions, "length")
            self._unacknowledged.append((self._batch, done))
        while self._waiting and len(self._running) < self._places:
            ends = now + self._seconds * self._rng.uniform(0.5, 1.5)
            heapq.heappush(self._running, (ends, self._waiting.popleft().request_id))

    async def stage(self, command: StageCommand) -> StageReport:
        """At once."""
        return StageReport(
            replica=self._replica_id, version=command.manifest.version, digest=command.manifest.digest, seconds=0.0
        )

    async def swap(self, command: SwapCommand) -> SwapReport:
        """At once."""
        self._version = command.version
        return SwapReport(replica=self._replica_id, version=command.version, digest=DIGEST, pause_seconds=0.0)

    async def discard_staged(self, version: int) -> None:
        """Nothing is held."""

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Whatever is asked for."""
        return version == self._version

    async def unpin(self, version: int) -> None:
        """Nothing is held."""

    async def pause(self) -> None:
        """Nothing to stop."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def report(self) -> ReplicaReport:
        """A READY replica."""
        return ReplicaReport(replica=self._replica_id, state="ready", version=self._version, digest=DIGEST)


class FakeTrainer:
    """Implements `TrainerControl`: a snapshot is a number."""

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """At once."""
        return CaptureReport(version=command.version, digest=DIGEST, bytes=0, seconds=0.0, wait_seconds=0.0)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """At once."""
        manifest = WeightManifest(
            version=command.version,
            tensors=(),
            aliases={},
            total_bytes=0,
            digest=DIGEST,
            arena_id="arena-0",
            address="",
        )
        return PublishReport(published=Published(manifest), seconds=0.0)


@dataclass(frozen=True, slots=True)
class ControlPlaneReport:
    """What passed through the loops in `seconds`."""

    samples: int
    versions: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """Samples that reached the trainer's side."""
        return self.samples / self.seconds


class ControlPlane:
    """All loops of a run but the trainer's updates, over `config.rollout.num_replicas` fake replicas."""

    def __init__(self, config: Config, *, tokens: int, response_seconds: float, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.events = SilentEvents()
        replicas = [
            FakeReplica(
                f"replica-{index}",
                places=config.rollout.max_num_seqs,
                tokens=tokens,
                seconds=response_seconds,
                clock=clock,
            )
            for index in range(config.rollout.num_replicas)
        ]
        self._queue = MessageQueue(
            capacity=config.max_required_samples,
            producers=["rollouter"],
            put_timeout_seconds=config.trainer.stall_timeout_seconds,
            clock=clock,
            events=self.events,
        )
        self._rollouter = FullyAsyncRollouter(
            config,
            life=LIFE,
            prompts=EndlessPrompts(),
            replicas=replicas,
            queue=self._queue,
            reward=LengthReward(),
            decoder=NumberDecoder(),
            stop_token_ids=(),
            clock=clock,
            events=self.events,
        )
        self._synchronizer = ParameterSynchronizer(
            config, FakeTrainer(), self._rollouter, self._queue, clock=clock, events=self.events
        )
        self._batcher = Batcher(
            queue=self._queue,
            life=LIFE,
            required_samples=config.required_samples,
            stall_seconds=config.trainer.stall_timeout_seconds,
            clock=clock,
            events=self.events,
        )
        self.samples = 0
        self.versions = 0

    async def run(self, seconds: float) -> ControlPlaneReport:
        """Let samples flow for so long."""
        rolling = asyncio.ensure_future(self._rollouter.fit())
        training = asyncio.ensure_future(self._train())
        began = self._clock.now()
        try:
            await asyncio.wait({rolling, training}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in (rolling, training):
                if task.done():
                    task.result()
        finally:
            for task in (rolling, training):
                task.cancel()
            await asyncio.gather(rolling, training, return_exceptions=True)
        return ControlPlaneReport(self.samples, self.versions, self._clock.now() - began)

    async def _train(self) -> None:
        await self._sync()
        trigger = self._config.async_training.trigger_parameter_sync_step
        updates = 0
        while True:
            try:
                batch = await self._batcher.next_batch()
            except QueueClosed:
                return
            if batch is None:
                return
            self.samples += len(batch)
            updates += 1
            if updates % trigger == 0:
                await self._sync()

    async def _sync(self) -> None:
        await self._synchronizer.sync_weights(Version(LIFE, self.versions).packed)
        self.versions += 1
