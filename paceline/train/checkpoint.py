"""Checkpointer: one consistent cut of the whole run, while generation goes on.

    rollouter's snapshot -> message queue's content -> trainer's held samples -> files, as one transaction

Law: the trainer stands between two updates and takes no sample while the cut is taken, so a sample moves one way only:
from the rollouter to the queue. Asked in this order, none is missed; one that moved in between is seen twice and kept
once; one that was admitted after the rollouter was asked is left out, and is admitted again by whoever goes on. A disk
that does not take the checkpoint costs that checkpoint only.

waits for: the rollouter's and the queue's answers, the disk; unblocked by: them, or the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from paceline.core.checkpoint import (
    FORMAT,
    META_FILE,
    ROLLOUTER_FILE,
    CheckpointMeta,
    RollouterSnapshot,
    decode_rollouter,
    encode_rollouter,
    sampling_settings,
)
from paceline.core.checkpoint_ports import CheckpointStore
from paceline.core.commands import ValidationResult
from paceline.core.config import Config
from paceline.core.errors import CheckpointError
from paceline.core.events import CheckpointFailed, CheckpointSaved, EventSink
from paceline.core.ports import Clock, QueueControl, SampleSource, TrainBackend, Work
from paceline.core.sample import Sample, decode_sample, sample_number
from paceline.core.version import Lineage
from paceline.core.waits import Waits


class TrainerStand(NamedTuple):
    """Where the trainer stands: updates made in all, and since the last sync was begun."""

    step: int
    updates_since_sync: int


class Checkpointer:
    """Saves the run into `store`. `saved_step` is the update of the checkpoint that this life was resumed from."""

    def __init__(
        self,
        config: Config,
        *,
        run_id: str,
        lineage: Lineage,
        store: CheckpointStore,
        backend: TrainBackend,
        source: SampleSource,
        queue: QueueControl,
        work: Work,
        clock: Clock,
        events: EventSink,
        saved_step: int = 0,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._lineage = lineage
        self._store = store
        self._backend = backend
        self._source = source
        self._queue = queue
        self._work = work
        self._clock = clock
        self._events = events
        self._saved_step = saved_step
        self._validation: ValidationResult | None = None
        self._seconds = config.checkpoint_engine.sync_timeout_seconds
        self._waits = Waits(who="trainer", clock=clock, events=events)

    def is_due(self, step: int) -> bool:
        """Whether `trainer.save_freq` updates were made since the last checkpoint."""
        frequency = self._config.trainer.save_freq
        return frequency > 0 and step - self._saved_step >= frequency

    async def save(self, stand: TrainerStand, captured: Callable[[], int], held: Sequence[Sample]) -> None:
        """Save, unless there is a checkpoint of this update. `captured` gives the last captured version (packed)."""
        if stand.step == self._saved_step:
            return
        began = self._clock.now()
        await self._work.run(self._store.begin)
        cut = await self._cut(stand, held)
        # Read after the cut: an aborted sync may be tried again beside it, and no token in it may be of a later one.
        version = captured()
        parts = {ROLLOUTER_FILE: encode_rollouter(cut), META_FILE: msgspec.json.encode(self._meta(stand, version, cut))}
        try:
            size = await self._work.run(lambda: self._store.save(stand.step, self._backend.save_state, parts))
        except CheckpointError as error:
            self._events.emit(CheckpointFailed(step=stand.step, error=error.message))
            return
        self._saved_step = stand.step
        self._events.emit(
            CheckpointSaved(
                step=stand.step,
                version=version,
                seconds=self._clock.now() - began,
                bytes=size,
                open_samples=len(cut.groups) + len(cut.ready),
            )
        )

    async def _cut(self, stand: TrainerStand, held: Sequence[Sample]) -> RollouterSnapshot:
        encoded = await self._waits.bounded(
            self._source.snapshot(), seconds=self._seconds, what="the rollouter's snapshot", culprit="rollouter"
        )
        queued = await self._waits.bounded(
            self._queue.peek_samples(), seconds=self._seconds, what="the content of the queue", culprit="message queue"
        )
        await self._waits.bounded(
            self._read_validations(), seconds=self._seconds, what="validation results", culprit="message queue"
        )
        arrived = [*held, *(decode_sample(item) for item in queued)]
        window_taken = stand.updates_since_sync * self._config.required_samples
        return merge_cut(decode_rollouter(encoded), arrived, window_taken)

    async def _read_validations(self) -> None:
        while (encoded := await self._queue.get_validate()) is not None:
            result = msgspec.msgpack.decode(encoded, type=ValidationResult)
            if self._validation is None or result.version > self._validation.version:
                self._validation = result

    def _meta(self, stand: TrainerStand, version: int, cut: RollouterSnapshot) -> CheckpointMeta:
        return CheckpointMeta(
            format=FORMAT,
            run_id=self._run_id,
            life=self._lineage.life,
            step=stand.step,
            version=version,
            updates_since_sync=stand.updates_since_sync,
            lineage=self._lineage,
            admitted=cut.admitted,
            failed=cut.failed,
            dropped=cut.dropped,
            open_ids=cut.open_ids,
            sampling=sampling_settings(self._config),
            validation=self._validation,
        )


def merge_cut(snapshot: RollouterSnapshot, arrived: Sequence[Sample], window_taken: int) -> RollouterSnapshot:
    """The rollouter's snapshot with what had left it: `arrived` are the samples held by the trainer and in the queue,
    oldest first, looked at after it. `window_taken` samples of the open admission window were trained.
    """
    mine = [sample for sample in arrived if sample_number(sample.sample_id) <= snapshot.admitted]
    known = {sample.sample_id for sample in mine}
    return msgspec.structs.replace(
        snapshot,
        groups=[group for group in snapshot.groups if group.sample_id not in known],
        ready=[*mine, *(sample for sample in snapshot.ready if sample.sample_id not in known)],
        window_taken=window_taken,
    )
