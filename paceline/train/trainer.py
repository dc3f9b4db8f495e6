"""FullyAsyncTrainer: consumes samples, makes updates, starts a weight sync every `trigger_parameter_sync_step` updates.

consumes: samples (batcher); produces: updates, versions; waits for: samples, its own snapshot, the sync before the
last one; unblocked by: the message queue, `capture_weights`, the synchronizer.

Law: the trainer is blocked by a sync only until its snapshot is taken (CAPTURED). A token's lag is taken when its
sample is consumed: captured version minus the token's version (V7). Version 0 is captured before the first update.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.core.commands import CaptureCommand, CaptureReport, PublishCommand, PublishReport, SyncReport
from paceline.core.config import Config
from paceline.core.errors import (
    DeadlineExceeded,
    LateCommand,
    NonFiniteWeights,
    RunInterrupted,
    SyncError,
    VersionError,
    WorkerDied,
)
from paceline.core.events import EventSink, SampleTrained, TrainStep
from paceline.core.manifest import Published, WeightManifest
from paceline.core.ports import Clock, QueueControl, RolloutLog, SampleSource, SynchronizerControl, TrainBackend, Work
from paceline.core.sample import Sample, TrainBatch
from paceline.core.version import Lineage, Version
from paceline.core.waits import Waits
from paceline.core.weight_ports import WeightSender
from paceline.train.batcher import Batcher
from paceline.train.checkpoint import Checkpointer, TrainerStand
from paceline.train.lag_gate import LagGate
from paceline.train.reward_metrics import reward_metrics
from paceline.train.staleness import token_lags
from paceline.train.train_batch import make_train_batch

ARENA_POLL_SECONDS = 0.005
SYNC_PHASES = 9  # capture, encode, stage, swap, discard, three of publication, each with a deadline; and one to spare


class FullyAsyncTrainer:
    """The trainer's loop over its worker group (one backend)."""

    def __init__(
        self,
        config: Config,
        *,
        life: int,
        backend: TrainBackend,
        sender: WeightSender,
        queue: QueueControl,
        source: SampleSource,
        work: Work,
        publish_work: Work,
        rollout_log: RolloutLog,
        clock: Clock,
        events: EventSink,
        lineage: Lineage | None = None,
        resumed_at: TrainerStand | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._config = config
        self._life = life
        self._lineage = lineage or Lineage(life)
        self._backend = backend
        self._sender = sender
        self._work = work
        self._publish_work = publish_work
        self._publication: asyncio.Future[Published] | None = None
        self._rollout_log = rollout_log
        self._clock = clock
        self._events = events
        self._waits = Waits(who="trainer", clock=clock, events=events)
        self._source = source
        self._gate = LagGate(config.async_training, source, self._lineage)
        self._batcher = Batcher(
            queue=queue,
            life=life,
            required_samples=config.required_samples,
            stall_seconds=config.trainer.stall_timeout_seconds,
            clock=clock,
            events=events,
            on_refused=self._gate.refused,
        )
        self._is_resumed = resumed_at is not None
        self._step, self._since_sync = resumed_at or TrainerStand(0, 0)
        self._checkpointer = checkpointer
        self._preempted: asyncio.Future[None] | None = None
        self._last_update_ended = clock.now()
        self._captured: Version | None = None
        self._manifests: deque[WeightManifest] = deque(maxlen=config.arenas)
        self._capture_done = asyncio.Event()
        self._sync: asyncio.Task[SyncReport] | None = None
        phases = config.checkpoint_engine.sync_attempts * SYNC_PHASES
        self._sync_seconds = (
            phases * config.checkpoint_engine.sync_timeout_seconds + config.rollout.replica_return_seconds
        )

    def get_actor_wg(self) -> Sequence[TrainBackend]:
        """The actor worker group: one rank."""
        return [self._backend]

    def get_current_param_version(self) -> int:
        """The captured version (packed), -1 before the first."""
        return -1 if self._captured is None else self._captured.packed

    async def fit(self, synchronizer: SynchronizerControl) -> None:
        """Train to the end of the data; returns after the last version is published and validated.

        Raises:
            RunInterrupted: `preempt` was called, and a checkpoint is saved.
        """
        await self._start_sync(synchronizer, self._config.trainer.val_before_train and not self._is_resumed)
        trigger = self._config.async_training.trigger_parameter_sync_step
        total = self._config.total_steps
        while self._step < total:
            await self._leave_if_asked()
            waited_from = self._clock.now()
            urgent = await self._urgent() if self._since_sync + 1 >= trigger else []
            samples = await self._next_batch(urgent)
            if samples is None:
                await self._leave_if_asked()
                break
            await self._update(samples, waited_from)
            self._since_sync += 1
            left_urgent = len(urgent) > self._config.required_samples  # more than a batch holds: one more update first
            if self._since_sync >= trigger and self._step < total and not left_urgent:
                before = self._captured
                await self._start_sync(synchronizer, self._validation_is_due())
                self._since_sync = 0
                if self._captured != before:  # else it was skipped: the weights are not finite
                    await self._save_if_due()
        await self._finish(synchronizer)

    async def preempt(self) -> None:
        """Save at the next update boundary and end `fit` there; returns once that is done. Twice is harmless."""
        if self._checkpointer is None:
            return
        if self._preempted is None:
            self._preempted = asyncio.get_running_loop().create_future()
        self._batcher.interrupt()
        await asyncio.shield(self._preempted)

    async def _leave_if_asked(self) -> None:
        if self._preempted is None or self._checkpointer is None:
            return
        await self._save(self._checkpointer)
        self._preempted.set_result(None)
        raise RunInterrupted(f"the trainer was asked to leave after update {self._step}", int(signal.SIGTERM))

    async def _save_if_due(self) -> None:
        if self._checkpointer is not None and self._checkpointer.is_due(self._step):
            await self._save(self._checkpointer)

    async def _save(self, checkpointer: Checkpointer) -> None:
        stand = TrainerStand(self._step, self._since_sync)
        await checkpointer.save(stand, self.get_current_param_version, self._batcher.held)

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """Take the snapshot that the synchronizer asks for; waits for a free arena.

        Raises:
            LateCommand: past its deadline, or of another life. DeadlineExceeded: no arena came free; names its holders,
                or the publication before that is still at work.
        """
        version = Version.unpack(command.version)
        if version.life != self._life:
            raise LateCommand(f"trainer lives in life {self._life}; a capture for life {version.life} is refused")
        if self._captured is not None and version <= self._captured:
            raise VersionError(f"trainer has captured {self._captured}; {version} is not newer")
        began = self._clock.now()
        await self._free_arena(command.deadline_wall)
        free_at = self._clock.now()
        captured = await self._work.run(
            lambda: self._sender.capture(self._backend.named_tensors(), command.version, command.base_version)
        )
        self._captured = version
        self._capture_done.set()
        return CaptureReport(
            version=captured.version,
            digest=captured.digest,
            bytes=captured.total_bytes,
            seconds=self._clock.now() - free_at,
            wait_seconds=free_at - began,
        )

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """Encode and publish the snapshot beside the next update, in a thread of its own.

        Raises:
            LateCommand: past its deadline. VersionError: another version is captured.
        """
        version = Version.unpack(command.version)
        if self._clock.wall() > command.deadline_wall:
            raise LateCommand(f"trainer: the publication of {version} was asked for after its deadline")
        if self._captured != version:
            raise VersionError(f"trainer has captured {self._captured}; {version} cannot be published")
        began = self._clock.now()
        self._publication = asyncio.ensure_future(self._publish_work.run(self._sender.publish))
        # A caller that leaves does not end the work: the next capture waits for it.
        self._publication.add_done_callback(_heard)
        published = await asyncio.shield(self._publication)
        self._manifests.append(published.manifest)
        return PublishReport(published=published, seconds=self._clock.now() - began)

    async def captured_manifest(self, version: int) -> WeightManifest:
        """The manifest of a version (packed) that the sender may still hold.

        Raises:
            SyncError: it was not captured, or so long ago that its memory is another version's.
        """
        for manifest in self._manifests:
            if manifest.version == version:
                return manifest
        raise SyncError(f"the trainer no longer has the snapshot of {Version.unpack(version)}")

    async def settle(self, seconds: float) -> None:
        """Let a publication that is still at work end, at most so long: its sender is about to be closed."""
        if self._publication is not None:
            await asyncio.wait({self._publication}, timeout=seconds)

    async def save_pretrained(self, directory: str) -> None:
        """Write the model as a Hugging Face directory."""
        await self._work.run(lambda: self._backend.save_pretrained(directory))

    async def _urgent(self) -> list[str]:
        """Samples that the next capture would carry over `max_version_lag`."""
        return await self._gate.urgent_before(self._current().next())

    async def _next_batch(self, urgent: Sequence[str]) -> list[Sample] | None:
        """The next batch; a sync that fails meanwhile is raised here, not at the deadline of the samples that it kept
        away.
        """
        captured = self._current()
        batch = asyncio.ensure_future(
            self._batcher.next_batch(urgent, lambda sample: self._gate.refuses(sample, captured), self._urgent)
        )
        try:
            while not batch.done():
                watched: set[asyncio.Future[Any]] = {batch} if self._sync is None else {batch, self._sync}
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if self._sync is not None and self._sync.done():
                    await self._end_of_sync()
            return batch.result()
        finally:
            batch.cancel()

    def _current(self) -> Version:
        if self._captured is None:
            raise VersionError("the trainer has captured no version yet")
        return self._captured

    async def _free_arena(self, deadline_wall: float) -> None:
        while self._publication is not None and not self._publication.done():
            if self._clock.wall() > deadline_wall:
                raise DeadlineExceeded("the trainer still publishes the version before", "trainer", 0.0)
            await self._clock.sleep(ARENA_POLL_SECONDS)
        while holders := self._sender.blocking_holders():
            if self._clock.wall() > deadline_wall:
                names = ", ".join(holders)
                raise DeadlineExceeded(f"the trainer found no free arena: all are held by {names}", names, 0.0)
            await self._clock.sleep(ARENA_POLL_SECONDS)

    async def _update(self, samples: list[Sample], waited_from: float) -> None:
        began = self._clock.now()
        blocked_seconds = waited_from - self._last_update_ended
        self._step += 1
        lags = token_lags(samples, self._current(), self._lineage)
        self._gate.consumed(samples)
        batch = make_train_batch(samples, self._current(), config=self._config, lineage=self._lineage, gate=self._gate)
        metrics = await self._work.run(lambda: self._backend.update(batch))
        self._last_update_ended = self._clock.now()
        self._record(samples, batch, lags)
        responses = [response for sample in samples for response in sample.responses]
        tokens = sum(len(response.token_ids) for response in responses)
        self._events.emit(
            TrainStep(
                step=self._step,
                version=self.get_current_param_version(),
                seconds=self._last_update_ended - began,
                wait_seconds=began - waited_from,
                blocked_seconds=blocked_seconds,
                reward_mean=sum(response.reward for response in responses) / len(responses),
                response_length_mean=tokens / len(responses),
                sequences=len(batch.sequences),
                tokens=tokens,
                metrics=metrics | reward_metrics(responses),
            )
        )

    def _record(self, samples: list[Sample], batch: TrainBatch, lags: dict[int, int]) -> None:
        version = self.get_current_param_version()
        self._events.emit(
            SampleTrained(ids=[sample.sample_id for sample in samples], step=self._step, version=version, lags=lags)
        )
        for sample in samples:
            self._rollout_log.record(sample, version, "trained")
        self._rollout_log.flush()

    def _validation_is_due(self) -> bool:
        frequency = self._config.trainer.test_freq
        next_n = 0 if self._captured is None else self._captured.n + 1
        return frequency > 0 and next_n % frequency == 0

    async def _start_sync(self, synchronizer: SynchronizerControl, validate: bool) -> None:
        """Begin the next sync once the one before has ended; returns when the snapshot is taken."""
        await self._end_of_sync()
        self._capture_done.clear()
        self._sync = asyncio.ensure_future(self._publish(synchronizer, validate))
        captured = asyncio.ensure_future(self._capture_done.wait())
        try:
            await self._waits.bounded(
                asyncio.wait({captured, self._sync}, return_when=asyncio.FIRST_COMPLETED),
                seconds=self._sync_seconds,
                what=f"the snapshot of version {self._next_version()}",
                culprit="parameter synchronizer",
            )
        finally:
            captured.cancel()
        if self._sync.done():
            await self._end_of_sync()

    async def _publish(self, synchronizer: SynchronizerControl, validate: bool) -> SyncReport:
        """One sync; an aborted one is tried again with the weights as they are then. Replicas go on meanwhile."""
        for left in reversed(range(self._config.checkpoint_engine.sync_attempts)):
            version = self._next_version()
            try:
                await self._waits.bounded(
                    self._source.version_captured(version.packed, self._step * self._config.required_samples),
                    seconds=self._config.checkpoint_engine.sync_timeout_seconds,
                    what="the rollouter to hear of a capture",
                    culprit="rollouter",
                )
                return await synchronizer.sync_weights(
                    version.packed,
                    validate=validate,
                    global_steps=self._step,
                    use_trainer_do_validate=self._config.async_training.use_trainer_do_validate,
                )
            except NonFiniteWeights:
                raise
            except (SyncError, DeadlineExceeded, WorkerDied):
                if left == 0:
                    raise
        raise SyncError("checkpoint_engine.sync_attempts is 0")

    def _next_version(self) -> Version:
        return Version(self._life, self._lineage.begin) if self._captured is None else self._captured.next()

    async def _end_of_sync(self) -> None:
        """The end of the sync before, if there is one; its error is raised, unless it was one to be skipped."""
        if self._sync is None:
            return
        try:
            await self._waits.bounded(
                self._sync,
                seconds=self._sync_seconds,
                what="the end of the sync before",
                culprit="parameter synchronizer",
            )
        except NonFiniteWeights:
            if self._config.checkpoint_engine.nonfinite != "skip" or self._captured is None:
                raise
        self._sync = None

    async def _finish(self, synchronizer: SynchronizerControl) -> None:
        """Publish and validate what was trained last; the pin of an earlier validation is free by then."""
        await self._end_of_sync()
        await synchronizer.wait_last_valid()
        await self._start_sync(synchronizer, validate=True)
        self._since_sync = 0
        if self._checkpointer is not None and self._config.trainer.save_freq > 0:
            await self._save(self._checkpointer)
        await self._end_of_sync()
        await synchronizer.wait_last_valid()


def _heard(publication: asyncio.Future[Published]) -> None:
    """Its error, if nobody is there any more to take it, is not one of the event loop."""
    if not publication.cancelled():
        publication.exception()
