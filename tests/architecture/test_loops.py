"""Loops (floor 4) start no thread and use no executor: virtual time and threads do not mix."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import PACKAGE, Source, called_name, sources
from tests.architecture.test_floors import FLOORS, LOOPS

# A lock is fine: what the Work port runs may be beside the loop. Starting something beside the loop is not.
FORBIDDEN_CALLS = (
    "to_thread",
    "run_in_executor",
    "run_coroutine_threadsafe",
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
)


def thread_calls(source: Source) -> list[str]:
    """Calls in `source` that leave the event loop, one line each."""
    calls = [node for node in ast.walk(source.tree()) if isinstance(node, ast.Call)]
    return [f"{source.path}:{c.lineno}: {called_name(c)}" for c in calls if called_name(c) in FORBIDDEN_CALLS]


def test_loops_stay_on_the_event_loop() -> None:
    loops = [source for source in sources(PACKAGE) if FLOORS.get(source.room) == LOOPS]
    calls = [line for source in loops for line in thread_calls(source)]
    assert not calls, "\n".join(calls)


@pytest.mark.parametrize(
    "text", ["await asyncio.to_thread(f)", "loop.run_in_executor(None, f)", "threading.Thread(target=f)"]
)
def test_a_thread_is_seen(text: str) -> None:
    assert len(thread_calls(Source("paceline/sync/a.py", f"async def g():\n    {text}"))) == 1
