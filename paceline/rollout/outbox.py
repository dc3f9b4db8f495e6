"""Finished completions of a replica until their receiver has acknowledged them.

A lost reply loses nothing: completions are numbered, and each collection returns all that are not acknowledged. A
collection returns at 64 new completions or 5 ms after the first, so that calls between processes carry batches. What is
finished while the weights behind it are not proved yet is withheld until they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from paceline.core.ports import Clock
from paceline.core.sample import Completion

BATCH = 64
LINGER_SECONDS = 0.005


class Outbox:
    """Numbered completions, oldest first."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[tuple[int, Completion]] = deque()
        self._last = 0
        self._collected = 0
        self._arrived = asyncio.Event()
        self._withheld: list[Completion] | None = None

    def withhold(self) -> None:
        """Keep back what is put from now on, until it is handed out or forgotten."""
        self._withheld = self._withheld or []

    def hand_out(self) -> None:
        """The weights are proved."""
        withheld, self._withheld = self._withheld or [], None
        self.put(withheld)

    def forget_withheld(self) -> list[Completion]:
        """The weights were not what they should be; returns what nobody will get."""
        withheld, self._withheld = self._withheld or [], None
        return withheld

    def put(self, completions: Sequence[Completion]) -> None:
        """Add finished completions."""
        if self._withheld is not None:
            self._withheld += completions
            return
        for completion in completions:
            self._last += 1
            self._kept.append((self._last, completion))
        if completions:
            self._arrived.set()

    def acknowledge(self, number: int) -> list[Completion]:
        """The receiver has everything up to this number; returns what is let go now."""
        gone: list[Completion] = []
        while self._kept and self._kept[0][0] <= number:
            gone.append(self._kept.popleft()[1])
        return gone

    async def collect(self, wait_seconds: float) -> tuple[int, list[Completion]]:
        """All unacknowledged completions and the highest number among all; waits for a new one at most this long."""
        if self._last == self._collected:
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return self._last, [completion for _, completion in self._kept]
        if self._last - self._collected < BATCH:
            await self._clock.sleep(LINGER_SECONDS)
        self._collected = self._last
        return self._last, [completion for _, completion in self._kept]
