"""Batcher: collects exactly `required_samples` from the message queue for one update.

consumes: samples of the message queue; produces: whole batches; waits for: samples; unblocked by: the rollouter's puts,
end of data. Order is that of arrival, but for *urgent* samples: a batch takes these first and waits for those that
have not arrived. Rule for the end: an unfilled last batch is dropped and counted as `unfilled_last_batch`. Samples of
another life are dropped as `lost_lineage`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from paceline.core.errors import QueueClosed
from paceline.core.events import EventSink, SampleDropped
from paceline.core.ports import Clock, QueueControl
from paceline.core.sample import Sample, decode_sample, response_lengths
from paceline.core.waits import Waits

POLL_SECONDS = 1.0
AT_ONCE = 32  # samples that are decoded in one turn of the event loop


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
        on_refused: Callable[[Sequence[Sample]], Awaitable[None]] | None = None,
    ) -> None:
        self._queue = queue
        self._life = life
        self._required = required_samples
        self._stall_seconds = stall_seconds
        self._events = events
        self._waits = Waits(who="trainer", clock=clock, events=events)
        self._on_refused = on_refused or _tell_nobody
        self._held: list[Sample] = []
        self._ended = False
        self._interrupted = False

    @property
    def held(self) -> list[Sample]:
        """Samples that were taken from the queue and are in no batch yet."""
        return list(self._held)

    def interrupt(self) -> None:
        """From now on `next_batch` ends without a batch where it would wait for samples; what is held is kept."""
        self._interrupted = True

    def hold(self, samples: Collection[Sample]) -> None:
        """Put samples in front, as after a resume."""
        self._held = [*samples, *self._held]

    async def next_batch(
        self,
        urgent: Collection[str] = (),
        refuses: Callable[[Sample], bool] | None = None,
        still_urgent: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> list[Sample] | None:
        """The next whole batch, or None at the end of data and after `interrupt`.

        `urgent` are sample ids that this batch takes first (as many as it holds) and waits for. `still_urgent` is asked
        again while nothing else is missing: one of them may fail on its way. Samples that `refuses` holds to be beyond
        `max_version_lag` are dropped and told to `on_refused`.

        Raises:
            ProducerFailed: the rollouter failed. DeadlineExceeded: no batch within the deadline; names the rollouter.
        """
        wanted = frozenset(urgent)
        what = f"{self._required} samples" + (f", {len(wanted)} of them old" if wanted else "")
        return await self._waits.bounded(
            self._collect(wanted, refuses, still_urgent), seconds=self._stall_seconds, what=what, culprit="rollouter"
        )

    async def _collect(
        self,
        urgent: frozenset[str],
        refuses: Callable[[Sample], bool] | None,
        still_urgent: Callable[[], Awaitable[Collection[str]]] | None,
    ) -> list[Sample] | None:
        while True:
            if refuses is not None:
                await self._refuse(refuses)
            batch = self._compose(urgent)
            if batch is not None:
                return batch
            if self._ended:
                self._drop(self._held, "unfilled_last_batch")
                self._held = []
                return None
            if self._interrupted:
                return None
            await self._take()
            if still_urgent is not None and len(self._held) >= self._required:
                urgent = urgent.intersection(await still_urgent())

    def _compose(self, urgent: frozenset[str]) -> list[Sample] | None:
        first = [sample for sample in self._held if sample.sample_id in urgent]
        awaited = min(len(urgent), self._required)
        if len(self._held) < self._required or (len(first) < awaited and not self._ended):
            return None
        others = [sample for sample in self._held if sample.sample_id not in urgent]
        batch = [*first, *others][: self._required]
        chosen = {sample.sample_id for sample in batch}
        self._held = [sample for sample in self._held if sample.sample_id not in chosen]
        return batch

    async def _take(self) -> None:
        try:
            items, _ = await self._queue.get_samples(
                min(AT_ONCE, max(1, self._required - len(self._held))), POLL_SECONDS
            )
        except QueueClosed:
            self._ended = True
            return
        samples = [decode_sample(item) for item in items]
        self._drop([s for s in samples if s.life != self._life], "lost_lineage")
        self._held.extend(s for s in samples if s.life == self._life)

    async def _refuse(self, refuses: Callable[[Sample], bool]) -> None:
        refused = [sample for sample in self._held if refuses(sample)]
        if refused:
            self._held = [sample for sample in self._held if not refuses(sample)]
            self._drop(refused, "max_version_lag")
            await self._on_refused(refused)

    def _drop(self, samples: list[Sample], reason: str) -> None:
        if samples:
            self._events.emit(
                SampleDropped(ids=[s.sample_id for s in samples], reason=reason, lengths=response_lengths(samples))
            )


async def _tell_nobody(samples: Sequence[Sample]) -> None:
    """For a batcher whose samples nobody makes again."""
