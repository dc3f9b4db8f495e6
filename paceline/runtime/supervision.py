"""Supervision of the parts of a run: start all, connect, run until the trainer is done, stop all.

The first error of any part ends the run and is raised; a part that dies is named. Replicas alone may die: they are
started again beside the others. Every phase has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from paceline.core.errors import DeadlineExceeded, PacelineError, WorkerDied
from paceline.core.waits import Waits

START_SECONDS = 300.0
STOP_SECONDS = 2.0
POLL_SECONDS = 5.0
TRAINER = "trainer"


class PartsRuntime(Protocol):
    """What starts processes; `ray_runtime.RayRuntime` is one."""

    async def start(self) -> None: ...

    def launch(self, role: str) -> Any: ...

    async def connect(self) -> None: ...

    def kill(self, role: str) -> None: ...

    def stop(self, deadline_seconds: float) -> None: ...


class Supervisor:
    """Runs the parts; the end of `trainer` ends the run, `on_started` is called once the runtime is up.

    A replica whose process died, or that the rollouter lost because it does not answer, is ended and started again up
    to `max_restarts` times; then it is taken out. The run goes on without a part of `spare_roles` that died. Any other
    part's death ends the run.
    """

    def __init__(
        self,
        *,
        runtime: PartsRuntime,
        replica_roles: Sequence[str],
        other_roles: Sequence[str],
        max_restarts: int,
        waits: Waits,
        on_started: Callable[[], None],
        spare_roles: Sequence[str] = (),
    ) -> None:
        self._runtime = runtime
        self._replica_roles = list(replica_roles)
        self._spare_roles = list(spare_roles)
        others = (role for role in other_roles if role != TRAINER)
        self._roles = [TRAINER, *replica_roles, *others, *spare_roles]
        self._max_restarts = max_restarts
        self._restarts_left = dict.fromkeys(replica_roles, max_restarts)
        self._waits = waits
        self._on_started = on_started
        self._parts: dict[str, Any] = {}
        self._running: dict[asyncio.Task[None], str] = {}
        self._returning: set[str] = set()
        self._new_replica_wanted = asyncio.Event()

    async def run(self) -> None:
        """Start, connect, run to the end.

        Raises:
            PacelineError: the first error of any part that is no loss of a replica.
        """
        await self._runtime.start()
        self._on_started()
        self._parts = {role: self._runtime.launch(role) for role in self._roles}
        await self._start_all()
        await self._runtime.connect()
        for role in self._roles:
            self._watch(role)
        losses = asyncio.ensure_future(self._end_lost_replicas())
        try:
            await self._until_done(losses)
        finally:
            for task in [*self._running, losses]:
                task.cancel()

    def add_replica(self) -> str:
        """Have one more replica started beside the others, in a run that lives; its role. It gets traffic once it has
        confirmed a version, and is looked after as all are.
        """
        role = f"replica-{len(self._replica_roles)}"
        self._replica_roles.append(role)
        self._new_replica_wanted.set()
        return role

    async def preempt(self, seconds: float) -> None:
        """Have the trainer save, if it can within this time; to be called before `stop`."""
        trainer = self._parts.get(TRAINER)
        if trainer is None or seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await trainer.preempt()
        except (PacelineError, TimeoutError):
            return  # not connected yet, dead, or in a long update: the checkpoint before stays the newest

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

    def _watch(self, role: str) -> None:
        self._running[asyncio.ensure_future(self._parts[role].run())] = role

    async def _until_done(self, losses: asyncio.Task[None]) -> None:
        while True:
            wanted = asyncio.ensure_future(self._new_replica_wanted.wait())
            try:
                watched: set[asyncio.Task[Any]] = {*self._running, losses, wanted}
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
            if losses in done:
                losses.result()
            self._launch_new_replicas()
            ended = {self._running.pop(task): task.exception() for task in done & self._running.keys()}
            deaths = {role: error for role, error in ended.items() if isinstance(error, WorkerDied)}
            for role, error in [*deaths.items(), *ended.items()]:  # a death is the cause of the others' errors
                if isinstance(error, WorkerDied) and (role in self._restarts_left or role in self._spare_roles):
                    continue
                if error is not None:
                    raise error
                if role != TRAINER and TRAINER not in ended:
                    raise WorkerDied(f"{role} ended before the run was done", role)
            if TRAINER in ended:
                return
            for role, error in deaths.items():
                if role in self._restarts_left:
                    await self._replace(role, error)

    async def _replace(self, role: str, error: WorkerDied) -> None:
        """Start a dead replica again beside the others, or take it out."""
        self._runtime.kill(role)  # what has ended its loop may still hold memory and leases
        await self._parts["rollouter"].lose_replica(role, error.message)
        if self._restarts_left[role] == 0:
            del self._restarts_left[role]
            await self._parts["synchronizer"].remove_replicas([role])
            if not self._restarts_left:
                raise WorkerDied(f"no replica is left and none may be started again: {error.message}", role)
            return
        self._restarts_left[role] -= 1
        self._launch_beside_the_others(role)

    def _launch_new_replicas(self) -> None:
        self._new_replica_wanted.clear()
        for role in self._replica_roles:
            if role not in self._parts:
                self._restarts_left[role] = self._max_restarts
                self._launch_beside_the_others(role)

    def _launch_beside_the_others(self, role: str) -> None:
        self._returning.add(role)
        self._parts[role] = self._runtime.launch(role)
        self._running[asyncio.ensure_future(self._rejoin(role))] = role

    async def _rejoin(self, role: str) -> None:
        part = self._parts[role]
        try:
            await self._waits.bounded(part.start(), seconds=START_SECONDS, what=f"the return of {role}", culprit=role)
        except DeadlineExceeded as error:
            raise WorkerDied(error.message, role) from error
        running = asyncio.ensure_future(part.run())
        try:
            await self._join(role)
            self._returning.discard(role)
            await running
        finally:
            running.cancel()

    async def _join(self, role: str) -> None:
        try:
            await self._parts["synchronizer"].add_replicas([self._parts[role]])
        except PacelineError as error:  # nobody knows who knows it; another process is told from it
            raise WorkerDied(f"{role} could not join: {error.message}", role) from error

    async def _end_lost_replicas(self) -> None:
        """A replica that does not answer is ended, so that its memory is free and it can be started again."""
        while True:
            loss = await self._parts["rollouter"].next_loss(POLL_SECONDS)
            if loss is not None and loss[0] not in self._returning:  # the news may be of the process before
                self._runtime.kill(loss[0])

    async def _quietly(self, call: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await call
        except (PacelineError, TimeoutError):
            return  # it is being stopped; the guard ends what does not end itself
