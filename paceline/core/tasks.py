"""Running coroutines together so that the first failure ends all of them and reaches the caller as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from paceline.core.errors import WorkerDied


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until they end. The first error cancels the others and is raised as it is (no exception group).

    Raises:
        WorkerDied: one of them was cancelled, and not by us; it would be missed without a sign.
    """
    tasks = {asyncio.ensure_future(coroutine): getattr(coroutine, "__qualname__", "a part") for coroutine in coroutines}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise WorkerDied(f"{tasks[task]} was cancelled from outside", tasks[task])
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
