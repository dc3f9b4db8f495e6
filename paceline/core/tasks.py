"""Running coroutines together so that the first failure ends all of them and reaches the caller as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until they end. The first error cancels the others and is raised as it is (no exception group)."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
