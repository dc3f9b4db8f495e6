"""FullyAsyncTaskRunner: builds everything, supervises it, and leaves nothing behind.

    checked -> started -> running -> completed | interrupted | failed -> stopped -> summed up

The driver process: it holds the process guard (which outlives it), starts Ray and the parts, follows the event log
for the displays, turns signals into an orderly stop, and folds the log into `summary.json` at the end, whatever the
end was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TextIO

from paceline.core.config import Config
from paceline.core.errors import ConfigError, PacelineError, RunInterrupted
from paceline.core.events import RunFinished, RunStarted
from paceline.core.waits import Waits
from paceline.observability.display import Display, open_display
from paceline.observability.event_log import EventLog
from paceline.observability.reader import EventTail
from paceline.runtime.host_actor import HOSTS
from paceline.runtime.library_output import LibraryOutput
from paceline.runtime.model_files import check_model, weight_bytes
from paceline.runtime.placement import check_local_store
from paceline.runtime.process_guard import ProcessGuard
from paceline.runtime.ray_address import cluster_address
from paceline.runtime.ray_environment import prepare_environment, prepare_joining
from paceline.runtime.registry import model_path
from paceline.runtime.run_directory import close_run, create_run
from paceline.runtime.run_lock import RunLock
from paceline.runtime.serving import check_serving
from paceline.runtime.socket_paths import check_socket_paths
from paceline.runtime.spec import RunSpec
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.supervision import PartsRuntime, Supervisor
from paceline.runtime.system import SystemClock
from paceline.runtime.task_parts import check_task, settle_paths

OTHER_ROLES = ("trainer", "rollouter", "message_queue", "synchronizer")
FOLLOW_SECONDS = 0.25
STOP_SECONDS = 3.0
CLEAN_UP_SECONDS = 3.0
SIGNAL_EXIT_BASE = 128


class FullyAsyncTaskRunner:
    """One run from its spec to its summary."""

    def __init__(
        self,
        spec: RunSpec,
        runtime: PartsRuntime,
        displays: Sequence[Display],
        *,
        stop: StopSignal,
        command_wall: float,
    ) -> None:
        self._spec = spec
        self._displays = list(displays)
        self._stop = stop
        self._command_wall = command_wall
        self._clock = SystemClock()
        self._events = EventLog(spec.events_path, "driver", self._clock.wall)
        self._supervisor = Supervisor(
            runtime=runtime,
            replica_roles=spec.replica_ids,
            other_roles=OTHER_ROLES,
            spare_roles=spec.validator_ids,
            max_restarts=spec.config.rollout.max_replica_restarts,
            waits=Waits(who="driver", clock=self._clock, events=self._events),
            on_started=stop.install,
        )
        self._tail = EventTail.at_end(spec.events_path)  # displays show this life; the summary folds over all of them

    async def run(self) -> None:
        """Train.

        Raises:
            PacelineError: what ended the run before its end, one line.
        """
        self._record_start()
        self._show(lambda display: display.start())
        following = asyncio.ensure_future(self._follow())
        supervisor = self._supervisor
        try:
            await self._stop.race(supervisor.run())
        except PacelineError as error:
            if isinstance(error, RunInterrupted) and error.signal_number == signal.SIGTERM:
                await supervisor.preempt(self._spec.config.trainer.grace_seconds)
            await supervisor.stop()
            self._record_end("interrupted" if isinstance(error, RunInterrupted) else "failed", error)
            raise
        except Exception as error:  # a fault of ours: the log says how the run ended, the caller gets the error itself
            await supervisor.stop()
            self._record_end("failed", PacelineError(f"{type(error).__name__}: {error}"))
            raise
        else:
            await supervisor.stop()
            self._record_end("completed", None)
        finally:
            following.cancel()

    def add_replica(self) -> str:
        """See `Supervisor`."""
        return self._supervisor.add_replica()

    def sum_up(self) -> None:
        """Write the summary and show it; to be called once no process of the run writes events any more."""
        self._feed_displays()
        summary = close_run(self._spec)
        self._show(lambda display: display.stop(summary))

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
        if self._spec.resumed is not None:
            self._events.emit(self._spec.resumed.event)

    def _record_end(self, outcome: Literal["completed", "interrupted", "failed"], error: PacelineError | None) -> None:
        code = exit_code(error)
        self._events.emit(RunFinished(outcome=outcome, error=error.message if error else "", exit_code=code))

    async def _follow(self) -> None:
        while True:
            self._feed_displays()
            await self._clock.sleep(FOLLOW_SECONDS)

    def _feed_displays(self) -> None:
        records = self._tail.read()
        self._show(lambda display: display.feed(records))

    def _show(self, action: Callable[[Display], None]) -> None:
        for display in list(self._displays):
            try:
                action(display)
            except OSError:  # nobody looks any more (a closed pipe or terminal), or the disk is full: the run goes on
                self._displays.remove(display)


def exit_code(error: PacelineError | None) -> int:
    """0 without error, 2 for a refused configuration, 128 + the signal's number for a stop, 1 for the rest."""
    if error is None:
        return 0
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, RunInterrupted):
        return SIGNAL_EXIT_BASE + error.signal_number
    return 1


def run_training(config: Config, *, command_wall: float, hosts: Mapping[str, str] = HOSTS) -> int:
    """Run the main job; returns 0. `hosts` says which class hosts which kind of role (`host_actor`).

    Raises:
        PacelineError: refused, failed or interrupted; `exit_code` tells the process's exit code.
    """
    check_socket_paths()
    config = settle_paths(config)
    check_model(config, model_path(config))
    check_task(config)
    check_serving(config)
    address = cluster_address(config)
    if address is None:
        check_local_store(config, weight_bytes(config, model_path(config)))
    with StopSignal() as stop:
        lock = RunLock()
        spec = create_run(config, lock)
        guard = ProcessGuard.start([Path(spec.private_dir)])
        (prepare_environment if address is None else prepare_joining)(Path(spec.private_dir))
        with LibraryOutput(Path(spec.run_dir)) as output:
            # After the environment, which Ray reads when it is imported.
            from paceline.runtime.ray_runtime import RayRuntime

            runtime = RayRuntime(spec, stop, address=address, hosts=hosts)
            displays = _displays(spec, output.screen)
            runner = FullyAsyncTaskRunner(spec, runtime, displays, stop=stop, command_wall=command_wall)
            try:
                asyncio.run(runner.run())
            finally:
                runtime.stop(STOP_SECONDS)
                guard.finish(CLEAN_UP_SECONDS)
                runner.sum_up()
                lock.release()
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
