"""PauseBarrier: the whole fleet stands still, or goes on.

Law: after `begin` returned no member makes a decode step until `end`, members that join meanwhile included. Nobody is
left in doubt: a member that does not answer in time is lost, so that it is ended and started again. Both are
idempotent, and a `begin` that comes late is refused, since its caller may have ended it already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.core.errors import LateCommand
from paceline.core.ports import Clock
from paceline.rollout.fleet import Fleet


class PauseBarrier:
    """Over one fleet."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._is_up = False

    async def begin(self, deadline_wall: float | None) -> None:
        """Pause all members.

        Raises:
            LateCommand: it is past `deadline_wall` (unix seconds); nothing was paused.
        """
        if deadline_wall is not None and self._clock.wall() > deadline_wall:
            raise LateCommand("rollouter: a pause came after its deadline")
        self._is_up = True
        await self._fleet.tell("a pause", lambda replica: replica.pause())

    async def end(self) -> None:
        """All members go on."""
        self._is_up = False
        await self._fleet.tell("a resume", lambda replica: replica.resume())

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Up within; every way out ends it."""
        try:
            await self.begin(None)
            yield
        finally:
            await self.end()

    async def member_joined(self) -> None:
        """A member that joins while the barrier is up stands still like all others."""
        if self._stands():
            await self._fleet.tell("a pause", lambda replica: replica.pause())
            if not self._stands():  # it ended meanwhile, and its resume may have overtaken this pause
                await self._fleet.tell("a resume", lambda replica: replica.resume())

    def _stands(self) -> bool:
        return self._is_up
