"""The machine's time, and what a test leaps over: a deadline comes when the test has seen all that is to be before it.

For real threads, processes and sockets, which the virtual clock does not mix with: nothing is late on a slow machine,
since deadlines are long, and nobody waits for the one that is meant to pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.runtime.system import SystemClock

T = TypeVar("T")


class LeapingClock(SystemClock):
    """Implements `core.ports.Clock`; timers of the loop that `run` makes go by it too."""

    def __init__(self) -> None:
        self.leaped = 0.0

    def now(self) -> float:
        """Monotonic seconds."""
        return super().now() + self.leaped

    def wall(self) -> float:
        """Unix seconds."""
        return super().wall() + self.leaped

    def leap(self, seconds: float) -> None:
        """So much has passed. A loop that waits does not notice: its timers need this called on the loop."""
        self.leaped += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`."""
        with asyncio.Runner(loop_factory=lambda: _LeapingLoop(self)) as runner:
            return runner.run(main)


class _LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: LeapingClock) -> None:
        self._leaping = clock
        super().__init__()

    def time(self) -> float:
        return super().time() + self._leaping.leaped
