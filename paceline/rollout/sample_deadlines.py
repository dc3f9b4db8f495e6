"""When a sample has been in flight for too long (`rollout.sample_timeout_seconds`).

consumes: samples as they are sent and as they end; produces: overdue samples; waits for: the earliest deadline;
unblocked by: time. A sample that an earlier life had begun begins its time anew.
"""

from __future__ import annotations

import asyncio

from paceline.core.ports import Clock

LEAST_WAIT_SECONDS = 0.001


class SampleDeadlines:
    """Deadlines of the samples in flight; `seconds` None: there are none."""

    def __init__(self, seconds: float | None, *, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[str, float] = {}  # all have the same time, so the first one is the earliest
        self._begun = asyncio.Event()

    def begin(self, sample_id: str) -> None:
        """Its responses are asked for."""
        if self._seconds is not None:
            self._until[sample_id] = self._clock.now() + self._seconds
            self._begun.set()

    def end(self, sample_id: str) -> None:
        """It is in flight no more. Twice is harmless."""
        self._until.pop(sample_id, None)

    async def overdue(self) -> list[str]:
        """Wait for the next samples whose time is over; they are forgotten."""
        while True:
            now = self._clock.now()
            late = [sample_id for sample_id, until in self._until.items() if until <= now]
            if late:
                for sample_id in late:
                    del self._until[sample_id]
                return late
            if self._until:
                await self._clock.sleep(max(LEAST_WAIT_SECONDS, next(iter(self._until.values())) - now))
            else:
                self._begun.clear()
                await self._begun.wait()
