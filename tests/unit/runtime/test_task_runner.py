"""However a run ends, its log says so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import build_config
from paceline.core.errors import PacelineError, SyncError
from paceline.core.events import RunFinished
from paceline.observability.reader import read_events
from paceline.runtime.run_directory import create_run
from paceline.runtime.run_lock import RunLock
from paceline.runtime.spec import RunSpec
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.task_runner import FullyAsyncTaskRunner, exit_code


class FailingRuntime:
    """Does not start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self) -> None:
        raise self._error

    def launch(self, role: str) -> Any:
        raise AssertionError("nothing is launched")

    async def connect(self) -> None:
        raise AssertionError("nothing is connected")

    def kill(self, role: str) -> None:
        raise AssertionError("nothing is killed")

    def stop(self, deadline_seconds: float) -> None:
        return


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[RunSpec]:
    lock = RunLock()
    made = create_run(build_config({"trainer": {"default_local_dir": str(tmp_path)}}), lock)
    yield made
    lock.release()
    shutil.rmtree(made.private_dir)


@pytest.mark.parametrize(
    ("error", "line"), [(SyncError("no replica"), "no replica"), (ValueError("a fault"), "ValueError: a fault")]
)
def test_the_log_ends_with_what_ended_the_run(spec: RunSpec, error: Exception, line: str) -> None:
    with StopSignal() as stop:
        runner = FullyAsyncTaskRunner(spec, FailingRuntime(error), [], stop=stop, command_wall=0.0)
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(runner.run())
    last = read_events(spec.events_path)[-1].event
    assert isinstance(last, RunFinished)
    assert (last.outcome, last.error, last.exit_code) == ("failed", line, exit_code(PacelineError(line)))
