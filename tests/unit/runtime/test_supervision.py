"""Starting, watching and stopping the parts of a run, with fake parts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline.core.errors import DeadlineExceeded, PacelineError, RunInterrupted, SyncError, WorkerDied
from paceline.core.waits import Waits
from paceline.runtime import supervision
from paceline.runtime.supervision import StopSignal, Supervisor
from paceline.runtime.system import SystemClock
from paceline.testing.recording import RecordingEvents


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    return


def failing(error: BaseException, after: float = 0.0) -> Callable[[], Coroutine[Any, Any, None]]:
    async def fail() -> None:
        await asyncio.sleep(after)
        raise error

    return fail


class FakePart:
    def __init__(self, start: Callable[[], Any], run: Callable[[], Any]) -> None:
        self._start = start
        self._run = run
        self.stopped = False

    async def start(self) -> None:
        await self._start()

    async def run(self) -> None:
        await self._run()

    async def stop(self) -> None:
        self.stopped = True


class FakeRuntime:
    def __init__(self, parts: dict[str, FakePart]) -> None:
        self.parts = parts
        self.connected = False

    async def start(self) -> None:
        return

    def launch(self, role: str) -> FakePart:
        return self.parts[role]

    async def connect(self) -> None:
        self.connected = True

    def stop(self, deadline_seconds: float) -> None:
        return


def supervise(parts: dict[str, FakePart]) -> None:
    async def main() -> None:
        waits = Waits(who="driver", clock=SystemClock(), events=RecordingEvents())
        supervisor = Supervisor(
            runtime=FakeRuntime(parts),
            roles=list(parts),
            done_role="trainer",
            waits=waits,
            on_started=lambda: None,
        )
        try:
            async with asyncio.timeout(10):
                await supervisor.run()
        finally:
            await supervisor.stop()

    asyncio.run(main())
    assert all(part.stopped for part in parts.values())


def test_the_end_of_the_trainer_is_the_end_of_the_run() -> None:
    supervise({"trainer": FakePart(at_once, at_once), "replica-0": FakePart(at_once, for_ever)})


@pytest.mark.parametrize("error", [SyncError("boom"), WorkerDied("replica-0 died", "replica-0")])
def test_the_first_error_of_any_part_is_raised_as_itself(error: PacelineError) -> None:
    parts = {"trainer": FakePart(at_once, for_ever), "replica-0": FakePart(at_once, failing(error))}
    with pytest.raises(type(error), match=error.message):
        supervise(parts)


def test_a_death_is_named_before_the_errors_that_follow_from_it() -> None:
    parts = {
        "trainer": FakePart(at_once, failing(SyncError("a sync failed"))),
        "replica-0": FakePart(at_once, failing(WorkerDied("replica-0 died", "replica-0"))),
    }
    with pytest.raises(WorkerDied, match="replica-0 died"):
        supervise(parts)


def test_a_part_that_ends_too_early_is_named() -> None:
    parts = {"trainer": FakePart(at_once, for_ever), "rollouter": FakePart(at_once, at_once)}
    with pytest.raises(WorkerDied, match="rollouter ended before the run was done"):
        supervise(parts)


def test_a_part_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "START_SECONDS", 0.05)
    parts = {"trainer": FakePart(at_once, at_once), "replica-1": FakePart(for_ever, for_ever)}
    with pytest.raises(DeadlineExceeded) as caught:
        supervise(parts)
    assert caught.value.culprit == "replica-1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_the_run(number: signal.Signals) -> None:
    async def main() -> None:
        stop = StopSignal()
        stop.install()
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        async with asyncio.timeout(10):
            await stop.race(for_ever())

    with pytest.raises(RunInterrupted, match=number.name) as caught:
        asyncio.run(main())
    assert caught.value.signal_number == number
