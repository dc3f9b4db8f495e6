"""Supervision of the parts of a run: start all, connect, run until the trainer is done, stop all.

The first error of any part ends the run and is raised; a part that dies is named. A stop signal raises
`RunInterrupted`. Every phase has a deadline.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from paceline.core.errors import DeadlineExceeded, PacelineError, RunInterrupted, WorkerDied
from paceline.core.waits import Waits

T = TypeVar("T")

START_SECONDS = 300.0
STOP_SECONDS = 2.0


class PartsRuntime(Protocol):
    """What starts processes; `ray_runtime.RayRuntime` is one."""

    async def start(self) -> None: ...

    def launch(self, role: str) -> Any: ...

    async def connect(self) -> None: ...

    def stop(self, deadline_seconds: float) -> None: ...


class StopSignal:
    """SIGINT and SIGTERM as a future that the run is raced against."""

    def __init__(self) -> None:
        self._raised: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def install(self) -> None:
        """Take over both signals; may be called again, after a library took them. A second signal changes nothing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, int(number))

    def _on_signal(self, number: int) -> None:
        if not self._raised.done():
            self._raised.set_result(number)

    async def race(self, work: Awaitable[T]) -> T:
        """The result of `work`.

        Raises:
            RunInterrupted: a signal came first; `work` is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            racing: set[asyncio.Future[Any]] = {task, self._raised}
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            name = signal.Signals(self._raised.result()).name
            raise RunInterrupted(f"stopped by {name}", self._raised.result())
        finally:
            task.cancel()


class Supervisor:
    """Runs the parts with these roles; `done_role` is the one whose end ends the run, `on_started` is called once the
    runtime is up.
    """

    def __init__(
        self,
        *,
        runtime: PartsRuntime,
        roles: list[str],
        done_role: str,
        waits: Waits,
        on_started: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._roles = roles
        self._done_role = done_role
        self._waits = waits
        self._on_started = on_started
        self._parts: dict[str, Any] = {}

    async def run(self) -> None:
        """Start, connect, run to the end.

        Raises:
            PacelineError: the first error of any part.
        """
        await self._runtime.start()
        self._on_started()
        self._parts = {role: self._runtime.launch(role) for role in self._roles}
        await self._start_all()
        await self._runtime.connect()
        await self._until_done({role: asyncio.ensure_future(part.run()) for role, part in self._parts.items()})

    async def stop(self) -> None:
        """Ask every part to stop; those that do not answer in time are left to the process guard."""
        calls = [self._quietly(part.stop()) for part in self._parts.values()]
        await asyncio.gather(*calls)

    async def _start_all(self) -> None:
        starting = {role: asyncio.ensure_future(part.start()) for role, part in self._parts.items()}
        try:
            await self._waits.bounded(
                asyncio.gather(*starting.values()),
                seconds=START_SECONDS,
                what=f"the start of {len(starting)} processes",
                culprit="the machine",
            )
        except DeadlineExceeded as error:
            late = ", ".join(role for role, task in starting.items() if task.cancelled() or not task.done())
            raise DeadlineExceeded(f"not started within {START_SECONDS:g} s: {late}", late, START_SECONDS) from error

    async def _until_done(self, running: Mapping[str, asyncio.Task[None]]) -> None:
        roles = {task: role for role, task in running.items()}
        pending = set(running.values())
        try:
            while not running[self._done_role].done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                self._raise_first({roles[task]: task for task in done})
        finally:
            for task in running.values():
                task.cancel()

    def _raise_first(self, done: Mapping[str, asyncio.Task[None]]) -> None:
        failed = {role: error for role, task in done.items() if (error := task.exception()) is not None}
        deaths = [error for error in failed.values() if isinstance(error, WorkerDied)]
        for error in [*deaths, *failed.values()]:  # a death is the cause of the others' errors
            raise error
        ended = [role for role in done if role != self._done_role]
        if ended and self._done_role not in done:
            raise WorkerDied(f"{ended[0]} ended before the run was done", ended[0])

    async def _quietly(self, call: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await call
        except (PacelineError, TimeoutError):
            return  # it is being stopped; the guard ends what does not end itself
