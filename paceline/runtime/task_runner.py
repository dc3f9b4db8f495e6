"""FullyAsyncTaskRunner: builds everything, supervises it, and leaves nothing behind.

    checked -> started -> running -> completed | interrupted | failed -> stopped -> summed up

The driver process: it holds the process guard (which outlives it), starts Ray and the parts, follows the event log
for the displays, turns signals into an orderly stop, and folds the log into `summary.json` at the end, whatever the
end was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TextIO

from paceline.core.config import Config
from paceline.core.errors import ConfigError, PacelineError, RunInterrupted
from paceline.core.events import RunFinished, RunStarted
from paceline.core.waits import Waits
from paceline.observability.display import Display, open_display
from paceline.observability.event_log import EventLog
from paceline.observability.reader import EventTail
from paceline.runtime.library_output import LibraryOutput
from paceline.runtime.process_guard import ProcessGuard
from paceline.runtime.ray_environment import prepare_environment
from paceline.runtime.registry import check_prompts
from paceline.runtime.run_directory import close_run, create_run
from paceline.runtime.spec import RunSpec
from paceline.runtime.supervision import PartsRuntime, StopSignal, Supervisor
from paceline.runtime.system import SystemClock

OTHER_ROLES = ("trainer", "rollouter", "message_queue", "synchronizer")
FOLLOW_SECONDS = 0.25
STOP_SECONDS = 3.0
CLEAN_UP_SECONDS = 3.0
SIGNAL_EXIT_BASE = 128


class FullyAsyncTaskRunner:
    """One run from its spec to its summary."""

    def __init__(
        self, spec: RunSpec, runtime: PartsRuntime, displays: Sequence[Display], *, command_wall: float
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._displays = displays
        self._command_wall = command_wall
        self._clock = SystemClock()
        self._events = EventLog(spec.events_path, "driver", self._clock.wall)
        self._tail = EventTail(spec.events_path)

    async def run(self) -> None:
        """Train.

        Raises:
            PacelineError: what ended the run before its end, one line.
        """
        stop = StopSignal()
        stop.install()
        self._record_start()
        for display in self._displays:
            display.start()
        following = asyncio.ensure_future(self._follow())
        supervisor = Supervisor(
            runtime=self._runtime,
            replica_roles=self._spec.replica_ids,
            other_roles=OTHER_ROLES,
            max_restarts=self._spec.config.rollout.max_replica_restarts,
            waits=Waits(who="driver", clock=self._clock, events=self._events),
            on_started=stop.install,
        )
        try:
            await stop.race(supervisor.run())
        except PacelineError as error:
            await supervisor.stop()
            self._record_end("interrupted" if isinstance(error, RunInterrupted) else "failed", error)
            raise
        else:
            await supervisor.stop()
            self._record_end("completed", None)
        finally:
            following.cancel()

    def sum_up(self) -> None:
        """Write the summary and show it; to be called once no process of the run writes events any more."""
        self._feed_displays()
        summary = close_run(self._spec)
        for display in self._displays:
            display.stop(summary)

    def _record_start(self) -> None:
        config = self._spec.config
        self._events.emit(
            RunStarted(
                run_id=self._spec.run_id,
                life=self._spec.life,
                seed=config.trainer.seed,
                cores=len(os.sched_getaffinity(0)),
                threads=self._spec.threads,
                command_wall=self._command_wall,
                total_steps=config.total_steps,
            )
        )

    def _record_end(self, outcome: Literal["completed", "interrupted", "failed"], error: PacelineError | None) -> None:
        code = exit_code(error)
        self._events.emit(RunFinished(outcome=outcome, error=error.message if error else "", exit_code=code))

    async def _follow(self) -> None:
        while True:
            self._feed_displays()
            await self._clock.sleep(FOLLOW_SECONDS)

    def _feed_displays(self) -> None:
        records = self._tail.read()
        for display in self._displays:
            display.feed(records)


def exit_code(error: PacelineError | None) -> int:
    """0 without error, 2 for a refused configuration, 128 + the signal's number for a stop, 1 for the rest."""
    if error is None:
        return 0
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, RunInterrupted):
        return SIGNAL_EXIT_BASE + error.signal_number
    return 1


def run_training(config: Config, *, command_wall: float) -> int:
    """Run the main job; returns 0.

    Raises:
        PacelineError: refused, failed or interrupted; `exit_code` tells the process's exit code.
    """
    check_prompts(config)
    spec = create_run(config)
    guard = ProcessGuard.start([Path(spec.private_dir)])
    prepare_environment()
    with LibraryOutput(Path(spec.run_dir)) as output:
        # After the environment, which Ray reads when it is imported.
        from paceline.runtime.ray_runtime import RayRuntime

        runtime = RayRuntime(spec)
        runner = FullyAsyncTaskRunner(spec, runtime, _displays(spec, output.screen), command_wall=command_wall)
        try:
            asyncio.run(runner.run())
        finally:
            runtime.stop(STOP_SECONDS)
            guard.finish(CLEAN_UP_SECONDS)
            runner.sum_up()
    return 0


def _displays(spec: RunSpec, screen: TextIO) -> list[Display]:
    wall = SystemClock().wall
    run_dir = Path(spec.run_dir)
    displays: list[Display] = []
    if "console" in spec.config.trainer.logger:
        displays.append(open_display(screen, run_dir, wall))
    if "tensorboard" in spec.config.trainer.logger:
        from paceline.observability.tensorboard_log import TensorBoardLog  # only when it is wanted

        displays.append(TensorBoardLog(run_dir / "tensorboard"))
    return displays
