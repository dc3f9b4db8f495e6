"""Running together: the first failure ends all, and nobody ends unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import SyncError, WorkerDied
from paceline.core.tasks import run_together


async def forever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise SyncError("first")


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def ends() -> None:
    return


def test_the_first_error_is_raised_as_it_is() -> None:
    with pytest.raises(SyncError, match="first"):
        asyncio.run(run_together(forever(), fails(), ends()))


def test_a_part_that_was_cancelled_is_missed() -> None:
    with pytest.raises(WorkerDied, match="cancels_itself was cancelled from outside"):
        asyncio.run(run_together(forever(), cancels_itself()))


def test_all_that_end_are_waited_for() -> None:
    asyncio.run(run_together(ends(), ends()))
