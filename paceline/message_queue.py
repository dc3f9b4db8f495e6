"""MessageQueue: the one road of samples from the rollouter to the trainer.

Bounded: `put_samples` awaits room (back-pressure), nothing is evicted. End of data and failure of a producer are
different things: once every producer has finished and the queue is drained consumers get `QueueClosed`; once a
producer failed and the queue is drained they get `ProducerFailed`. Items are opaque bytes, so this process needs no
torch. Statistics, version updates and shutdown never wait behind a blocked put. Ledger: put == taken + dropped +
size, at any time.

consumes: samples of the rollouter / produces: samples for the trainer / waits for: room, samples / unblocked by: the
trainer's takes, the rollouter's puts, finish, fail, shutdown.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

from paceline.core.commands import QueueStatistics
from paceline.core.errors import ProducerFailed, QueueClosed, VersionError
from paceline.core.events import EventSink, QueueLevel
from paceline.core.ports import Clock
from paceline.core.waits import Waits

_LEVEL_EVERY_SECONDS = 0.25
MAX_VALIDATIONS = 64  # results that nobody has taken; older ones go first, they are in the event log anyway


class MessageQueue:
    """FIFO of at most `capacity` samples. `put_timeout_seconds` bounds the wait for room."""

    def __init__(
        self,
        *,
        capacity: int,
        producers: Sequence[str],
        put_timeout_seconds: float,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._items: deque[bytes] = deque()
        self._capacity = capacity
        self._unfinished = set(producers)
        self._failure: str | None = None
        self._shut_down = False
        self._changed = asyncio.Condition()
        self._put = 0
        self._taken = 0
        self._dropped: Counter[str] = Counter()
        self._version = -1
        self._validations: deque[bytes] = deque(maxlen=MAX_VALIDATIONS)
        self._put_timeout_seconds = put_timeout_seconds
        self._clock = clock
        self._events = events
        self._level_shown_at = float("-inf")
        self._waits = Waits(who="rollouter", clock=clock, events=events)

    async def put_samples(self, items: Sequence[bytes]) -> int:
        """Append all items in order, waiting for room; returns the queue length.

        Raises:
            QueueClosed: the queue was shut down; nothing of the rest was taken.
            DeadlineExceeded: no room within the time-out; names the trainer.
        """
        left = deque(items)
        while left:
            await self._waits.bounded(
                self._until_room(),
                seconds=self._put_timeout_seconds,
                what=f"room in the message queue ({len(self._items)} of {self._capacity})",
                culprit="trainer",
            )
            while left and len(self._items) < self._capacity:
                self._items.append(left.popleft())
                self._put += 1
            await self._notify()
        return len(self._items)

    async def put_sample(self, item: bytes) -> int:
        """One item; see `put_samples`."""
        return await self.put_samples([item])

    async def get_samples(self, count: int, wait_seconds: float) -> tuple[list[bytes], int]:
        """Up to `count` items as soon as one is there; an empty list when none came within `wait_seconds`.

        Raises:
            QueueClosed: every producer has finished and all items are taken; again at every later call.
            ProducerFailed: a producer failed and all items are taken.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                await self._until_item_or_end()
        except TimeoutError:
            return [], 0
        if not self._items:
            self._raise_end()
        taken = [self._items.popleft() for _ in range(min(count, len(self._items)))]
        self._taken += len(taken)
        await self._notify()
        return taken, len(self._items)

    async def get_sample(self, wait_seconds: float) -> tuple[bytes | None, int]:
        """One item, or None when none came in time; see `get_samples`."""
        items, left = await self.get_samples(1, wait_seconds)
        return (items[0] if items else None), left

    async def peek_samples(self) -> list[bytes]:
        """Everything in the queue, oldest first; nothing is taken."""
        return list(self._items)

    async def put_validate(self, result: bytes) -> None:
        """Leave a validation result beside the samples; it never counts as one, and never waits for room."""
        self._validations.append(result)

    async def get_validate(self) -> bytes | None:
        """The oldest validation result, or None."""
        return self._validations.popleft() if self._validations else None

    async def update_param_version(self, version: int) -> None:
        """Raise the published version (packed).

        Raises:
            VersionError: it would go backwards.
        """
        if version < self._version:
            raise VersionError(f"message queue: version {version} after {self._version} would go backwards")
        self._version = version

    async def get_queue_size(self) -> int:
        """Samples in the queue."""
        return len(self._items)

    async def clear_queue(self, reason: str) -> int:
        """Drop everything for a named reason; returns how many."""
        count = len(self._items)
        self._items.clear()
        self._dropped[reason] += count
        await self._notify()
        return count

    async def get_statistics(self) -> QueueStatistics:
        """Counters since the start."""
        return QueueStatistics(
            size=len(self._items),
            capacity=self._capacity,
            put=self._put,
            taken=self._taken,
            dropped=dict(self._dropped),
            version=self._version,
            closed=self._ended,
        )

    async def finish(self, producer: str) -> None:
        """This producer has put its last sample. Twice is harmless."""
        self._unfinished.discard(producer)
        await self._notify()

    async def fail(self, producer: str, error: str) -> None:
        """This producer failed; the first failure is kept."""
        if self._failure is None:
            self._failure = f"{producer}: {error}"
        self._unfinished.discard(producer)
        await self._notify()

    async def shutdown(self) -> None:
        """Wake everybody; later puts and drained gets raise QueueClosed."""
        self._shut_down = True
        await self._notify()

    @property
    def _ended(self) -> bool:
        return self._shut_down or self._failure is not None or not self._unfinished

    async def _until_room(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._shut_down or len(self._items) < self._capacity)
        if self._shut_down:
            raise QueueClosed("the message queue was shut down")

    async def _until_item_or_end(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._items) or self._ended)

    def _raise_end(self) -> None:
        if self._failure is not None:
            raise ProducerFailed(f"the producer of samples failed: {self._failure}")
        raise QueueClosed("end of data: the message queue is closed and drained")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        now = self._clock.now()
        if now - self._level_shown_at >= _LEVEL_EVERY_SECONDS:
            self._level_shown_at = now
            self._events.emit(QueueLevel(size=len(self._items), capacity=self._capacity))
