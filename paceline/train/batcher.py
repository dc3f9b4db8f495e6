"""Batcher: collects exactly `required_samples` from the message queue for one update.

consumes: samples of the message queue; produces: whole batches; waits for: samples; unblocked by: the rollouter's
puts, end of data. Rule for the end: an unfilled last batch is dropped and counted as `unfilled_last_batch`. Samples
of another life are dropped as `lost_lineage`.
"""

from __future__ import annotations

from paceline.core.errors import QueueClosed
from paceline.core.events import EventSink, SampleDropped
from paceline.core.ports import Clock, QueueControl
from paceline.core.sample import Sample, decode_sample
from paceline.core.waits import Waits

POLL_SECONDS = 1.0


class Batcher:
    """Assembles batches; `stall_seconds` bounds the wait for one batch."""

    def __init__(
        self,
        *,
        queue: QueueControl,
        life: int,
        required_samples: int,
        stall_seconds: float,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._queue = queue
        self._life = life
        self._required = required_samples
        self._stall_seconds = stall_seconds
        self._events = events
        self._waits = Waits(who="trainer", clock=clock, events=events)
        self._collected: list[Sample] = []

    async def next_batch(self) -> list[Sample] | None:
        """The next whole batch, or None at the end of data.

        Raises:
            ProducerFailed: the rollouter failed. DeadlineExceeded: no batch within the deadline; names the rollouter.
        """
        return await self._waits.bounded(
            self._collect(), seconds=self._stall_seconds, what=f"{self._required} samples", culprit="rollouter"
        )

    async def _collect(self) -> list[Sample] | None:
        while len(self._collected) < self._required:
            try:
                items, _ = await self._queue.get_samples(self._required - len(self._collected), POLL_SECONDS)
            except QueueClosed:
                self._drop(self._collected, "unfilled_last_batch")
                self._collected = []
                return None
            samples = [decode_sample(item) for item in items]
            self._drop([s for s in samples if s.life != self._life], "lost_lineage")
            self._collected.extend(s for s in samples if s.life == self._life)
        batch, self._collected = self._collected, []
        return batch

    def _drop(self, samples: list[Sample], reason: str) -> None:
        if samples:
            self._events.emit(SampleDropped(ids=[s.sample_id for s in samples], reason=reason))
