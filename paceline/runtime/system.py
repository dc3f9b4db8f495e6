"""The real implementations of the `Clock` and `Work` ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


class ThreadWork:
    """Runs jobs one after another in a thread of its own, so that the event loop keeps answering."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)


class InlineWork:
    """Runs jobs on the event loop itself: for the virtual clock, where threads and time do not mix."""

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` now."""
        return job()
