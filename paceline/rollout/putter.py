"""Putter: scored samples to the message queue, in order, never more than the queue takes.

consumes: samples; produces: the queue's content; waits for: room in the queue; unblocked by: the trainer's takes.
Law: a sample is held here until the queue has it, so a checkpoint taken meanwhile has it here, there, or in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from paceline.core.ports import QueueControl
from paceline.core.sample import Sample, encode_sample
from paceline.core.waits import Waits

AT_ONCE = 32  # samples that are encoded in one turn of the event loop
QUEUE_ANSWERS_SECONDS = 30.0


class Putter:
    """`before_put` learns the ids of each call, in the order of the queue; `after_put` the newest sample in it."""

    def __init__(
        self,
        queue: QueueControl,
        *,
        stall_seconds: float,
        waits: Waits,
        before_put: Callable[[Sequence[str]], None],
        after_put: Callable[[Sample], None],
    ) -> None:
        self._queue = queue
        self._seconds = stall_seconds + QUEUE_ANSWERS_SECONDS  # the queue itself says when there is no room
        self._waits = waits
        self._before_put = before_put
        self._after_put = after_put
        self._ready: dict[str, Sample] = {}
        self._arrived = asyncio.Event()

    @property
    def ready(self) -> list[Sample]:
        """Samples that are not yet, or not yet known to be, in the queue; oldest first."""
        return list(self._ready.values())

    def hand_over(self, sample: Sample) -> None:
        """Put this sample as soon as there is room."""
        self._ready[sample.sample_id] = sample
        self._arrived.set()

    async def run(self, *, enough: int | None) -> None:
        """Put for ever; once so many are put the queue learns that this was all (None: it never does)."""
        put = 0
        while True:
            while not self._ready:
                self._arrived.clear()
                await self._arrived.wait()
            samples = list(islice(self._ready.values(), AT_ONCE))
            self._before_put([sample.sample_id for sample in samples])
            await self._waits.bounded(
                self._queue.put_samples([encode_sample(sample) for sample in samples]),
                seconds=self._seconds,
                what="the message queue to take samples",
                culprit="message queue",
            )
            for sample in samples:
                del self._ready[sample.sample_id]
            put += len(samples)
            self._after_put(samples[-1])
            if enough is not None and put >= enough:
                await self._queue.finish("rollouter")
