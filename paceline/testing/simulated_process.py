"""A process of a simulated run: it answers calls after a latency, can die, stand still, and lose a caller.

As between real processes, a caller's time-out or cancellation does not stop the callee, an error keeps its class, an
error outside the tree and a death reach the caller as `WorkerDied`, and a death is noticed after a while only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from paceline.core.errors import PacelineError, WorkerDied
from paceline.testing.fault_injector import FaultInjector
from paceline.testing.fault_plan import PHASE_OF_METHOD, Phase

T = TypeVar("T")


class SimulatedProcess:
    """Implements `fault_injector.Victim`. `latency()` is the way of a message, `notice_seconds` until a death is known.

    `version_phase` is the phase of `update_param_version`, which two kinds of part have.
    """

    def __init__(
        self,
        role: str,
        *,
        injector: FaultInjector,
        latency: Callable[[], float],
        notice_seconds: float,
        version_phase: Phase | None = None,
    ) -> None:
        self._role = role
        self._injector = injector
        self._latency = latency
        self._notice_seconds = notice_seconds
        self._version_phase = version_phase
        self._alive = True
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unanswered: set[asyncio.Future[None]] = set()
        self._still_until: float | None = 0.0
        self.target: Any = None
        self.release: Callable[[], None] = lambda: None

    @property
    def role(self) -> str:
        """Role of the process, for example `replica-1`."""
        return self._role

    @property
    def alive(self) -> bool:
        """It has not been killed."""
        return self._alive

    def kill(self) -> None:
        """Dead from now on."""
        if not self._alive:
            return
        self._alive = False
        for task in list(self._tasks):
            task.cancel()
        for future in self._unanswered:
            if not future.done():
                future.set_exception(self._death())
        self.release()

    def stand_still(self, seconds: float | None) -> None:
        """Nothing moves in it for so long; None: for ever."""
        self._still_until = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def moving(self) -> None:
        """Return once the process moves."""
        while self._still_until is None or self._still_until > asyncio.get_running_loop().time():
            if self._still_until is None:
                await self.never()
            else:
                await asyncio.sleep(self._still_until - asyncio.get_running_loop().time())

    async def never(self) -> None:
        """Wait for what will not come; raises WorkerDied when the process is killed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.add(future)
        try:
            await future
        finally:
            self._unanswered.discard(future)

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A call from another process."""
        phase = self._version_phase if method == "update_param_version" else PHASE_OF_METHOD.get(method)
        await asyncio.sleep(self._latency())
        if not self._alive:
            raise self._death()
        return await self._injector.around(
            phase, self, lambda: self.do(lambda: getattr(self.target, method)(*arguments, **keywords), method)
        )

    async def do(self, work: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        """Run a coroutine in this process and return its result; the caller may leave, the coroutine goes on."""
        await self.moving()
        if not self._alive:
            raise self._death()
        task = asyncio.ensure_future(self._answer(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            result = await asyncio.shield(task)
            await self.moving()
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            await asyncio.sleep(self._notice_seconds)
            raise self._death(f" in {what}") from error
        return result

    async def _answer(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            return await work()
        except PacelineError:
            raise
        except Exception as error:  # whatever a part raises reaches the caller by name, as between real processes
            line = f"{self._role} failed in {what}: {type(error).__name__}: {error}"
            raise WorkerDied(line, self._role) from error

    def _death(self, where: str = "") -> WorkerDied:
        return WorkerDied(
            f"{self._role} died{where}" if not self._alive else f"{self._role} was ended{where}", self._role
        )


class SimulatedPart:
    """A handle on a process: attribute access gives its coroutine methods, `replica_id` is its role."""

    def __init__(
        self, process: SimulatedProcess, *, start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
    ) -> None:
        self.process = process
        self.replica_id = process.role
        self._start = start
        self._stop = stop

    async def start(self) -> None:
        """The process begins."""
        await self._start()

    async def run(self) -> None:
        """The process's own loop."""
        await self.process.do(self.process.target.run, "run")

    async def stop(self) -> None:
        """The process ends on purpose."""
        await self._stop()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return await self.process.call(method, arguments, keywords)

        return call


class SimulatedWork:
    """The `Work` port: a job takes `seconds()` of virtual time, longer when its process stands still."""

    def __init__(self, process: SimulatedProcess, seconds: Callable[[], float]) -> None:
        self._process = process
        self._seconds = seconds

    async def run(self, job: Callable[[], T]) -> T:
        """Let the time pass, then do the job."""
        await asyncio.sleep(self._seconds())
        await self._process.moving()
        result = job()
        await self._process.moving()
        return result
