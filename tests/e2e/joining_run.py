"""A training that gets one more replica after two updates: python -m tests.e2e.joining_run SETTINGS..."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from paceline.cli.config_files import load_config
from paceline.core.events import TrainStep
from paceline.observability.reader import read_events
from paceline.runtime.process_guard import ProcessGuard
from paceline.runtime.ray_environment import prepare_environment
from paceline.runtime.run_directory import create_run
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.task_runner import FullyAsyncTaskRunner

POLL_SECONDS = 0.2
UPDATES = 2


async def train(runner: FullyAsyncTaskRunner, events: Path) -> None:
    """Run; add the replica on the way."""
    running = asyncio.ensure_future(runner.run())
    await asyncio.wait(
        {running, asyncio.ensure_future(asyncio.to_thread(_wait_for_updates, events))}, return_when="FIRST_COMPLETED"
    )
    runner.add_replica()
    await running


def _wait_for_updates(events: Path) -> None:
    while not events.exists() or sum(isinstance(record.event, TrainStep) for record in read_events(events)) < UPDATES:
        time.sleep(POLL_SECONDS)


def main() -> None:
    """As `paceline train` does it, without displays."""
    spec = create_run(load_config(None, sys.argv[1:]))
    guard = ProcessGuard.start([Path(spec.private_dir)])
    prepare_environment(Path(spec.private_dir))
    from paceline.runtime.ray_runtime import RayRuntime

    with StopSignal() as stop:
        runtime = RayRuntime(spec, stop)
        runner = FullyAsyncTaskRunner(spec, runtime, [], stop=stop, command_wall=time.time())
        try:
            asyncio.run(train(runner, spec.events_path))
        finally:
            runtime.stop(3.0)
            guard.finish(3.0)
            runner.sum_up()


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    finally:
        os._exit(code)  # Ray's own end of the process is not waited for
