"""The pause of a whole fleet, and a member that joins while it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from paceline.rollout.pause_barrier import PauseBarrier
from paceline.testing.virtual_clock import VirtualClock, run_virtual


class Member:
    def __init__(self) -> None:
        self.paused = False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False


class SlowFleet:
    """One member; a pause is on its way longer than a resume, so that a later resume overtakes it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.member = Member()
        self._clock = clock

    async def tell(self, what: str, call: Callable[[Any], Awaitable[None]]) -> None:
        await self._clock.sleep(1.0 if what == "a pause" else 0.1)
        await call(self.member)


def test_a_member_that_joins_while_the_pause_ends_does_not_stand_still_for_ever() -> None:
    async def main(clock: VirtualClock) -> None:
        fleet = SlowFleet(clock)
        barrier = PauseBarrier(cast("Any", fleet), clock)
        await barrier.begin(None)
        joining = asyncio.ensure_future(barrier.member_joined())
        await clock.sleep(0.5)
        await barrier.end()
        await joining
        assert not fleet.member.paused

    run_virtual(main)


def test_a_member_that_joins_during_the_pause_stands_still() -> None:
    async def main(clock: VirtualClock) -> None:
        fleet = SlowFleet(clock)
        barrier = PauseBarrier(cast("Any", fleet), clock)
        await barrier.begin(None)
        fleet.member.paused = False
        await barrier.member_joined()
        assert fleet.member.paused
        await barrier.end()
        assert not fleet.member.paused

    run_virtual(main)
