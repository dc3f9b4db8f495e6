"""FaultInjector: lets planned faults strike simulated processes, each once.

raise    the call fails with `InjectedFault`, before or after it took effect
cancel   the caller's task is cancelled while it waits
hang     the reply never comes; the call took effect or not; inside an engine: its process stands still for ever
delay    the reply is late, maybe later than the caller's deadline; inside an engine: its process stands still
kill     a replica's process is dead from now on: the callee, or in calls to other parts a replica chosen by seed
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from paceline.core.errors import SyncError, WorkerDied
from paceline.testing.fault_plan import Phase, PlannedFault

T = TypeVar("T")


class InjectedFault(SyncError):
    """A fault that the injector raised; no production code raises it."""


class Victim(Protocol):
    """A process that faults can strike."""

    @property
    def role(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    def kill(self) -> None:
        """It answers nobody any more, its loops end, its leases are free."""
        ...

    def stand_still(self, seconds: float | None) -> None:
        """It does nothing and answers nobody for so long; None: for ever."""
        ...

    async def never(self) -> None:
        """Wait for a reply that will not come; raises WorkerDied when the process is killed."""
        ...


class FaultInjector:
    """Counts the calls of each phase and strikes those that are planned. `landed` keeps what struck."""

    def __init__(self, planned: Sequence[PlannedFault], rng: random.Random | None = None) -> None:
        self._planned = list(planned)
        self._rng = rng or random.Random(0)
        self._calls: dict[Phase, int] = {}
        self.replicas: Callable[[], list[Victim]] = list
        self.landed: list[PlannedFault] = []

    async def around(self, phase: Phase | None, victim: Victim, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call of a process, with the fault that is planned for it."""
        fault = self._draw(phase)
        if fault is None:
            return await call()
        if fault.moment == "before":
            await self._strike(fault, victim)
        result = await call()
        if fault.moment == "after":
            await self._strike(fault, victim)
        return result

    def inside(self, phase: Phase, victim: Victim, work: Callable[[], T]) -> T:
        """Do work of an engine or a receiver in its process, with the fault that is planned for it."""
        fault = self._draw(phase)
        if fault is None:
            return work()
        if fault.moment == "before":
            self._strike_inside(fault, victim)
        result = work()
        if fault.moment == "after":
            self._strike_inside(fault, victim)
        return result

    def _draw(self, phase: Phase | None) -> PlannedFault | None:
        if phase is None:
            return None
        number = self._calls[phase] = self._calls.get(phase, 0) + 1
        for fault in self._planned:
            if (fault.phase, fault.call) == (phase, number):
                self._planned.remove(fault)
                self.landed.append(fault)
                return fault
        return None

    async def _strike(self, fault: PlannedFault, victim: Victim) -> None:
        if fault.kind == "raise":
            raise InjectedFault(f"injected: {fault}")
        if fault.kind == "hang":
            await victim.never()
        elif fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "cancel":
            task = asyncio.current_task()
            if task is not None:
                task.cancel()
            await asyncio.sleep(0)
        else:
            self._kill(victim)

    def _strike_inside(self, fault: PlannedFault, victim: Victim) -> None:
        if fault.kind == "raise":
            raise InjectedFault(f"injected: {fault}")
        if fault.kind == "hang":
            victim.stand_still(None)
        elif fault.kind == "delay":
            victim.stand_still(fault.seconds)
        elif fault.kind == "cancel":
            task = asyncio.current_task()
            if task is not None:
                task.cancel()
        else:
            self._kill(victim)

    def _kill(self, victim: Victim) -> None:
        replicas = self.replicas() or [victim]
        chosen = victim if victim in replicas else self._rng.choice(replicas)
        chosen.kill()
        if chosen is victim:
            raise WorkerDied(f"{victim.role} died", victim.role)
