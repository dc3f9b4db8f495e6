"""A virtual clock: asyncio time that jumps to the next timer instead of waiting for it.

`run_virtual(main)` runs a coroutine on a loop whose `time()` moves only when nothing is ready, so a simulation of an
hour takes milliseconds and always takes the same course. Threads do not mix with it: hand the loops `InlineWork`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from paceline.core.errors import DeadlineExceeded

T = TypeVar("T")

EPOCH_WALL = 1_700_000_000.0  # an arbitrary fixed unix time, so that logs of a simulation repeat exactly


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks: a wait moves the loop's virtual time instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlineExceeded("every task waits and no timer is set: the simulation is stuck", "simulation", 0.0)
        if timeout > 0:
            self.now += timeout
        return []  # nothing but this loop can wake it, so the machine is not asked


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now


class VirtualClock:
    """The `Clock` port on the running virtual loop."""

    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Virtual unix seconds."""
        return EPOCH_WALL + self.now()

    async def sleep(self, seconds: float) -> None:
        """Advance by at least this long."""
        await asyncio.sleep(seconds)


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end on virtual time.

    Raises:
        DeadlineExceeded: every task waits and no timer could wake one.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(VirtualClock()))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
