"""One peer's processes and its measured rounds; the clock is the one by which the engine is measured."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import WorkerProcess
from paceline.cli.sync_bench.peers.peer_table import PEERS

PROCESS = "paceline.cli.sync_bench.peers.peer_process"
WARM_UPS = 2


@dataclass(frozen=True)
class PeerPlan:
    """`directory` is in memory (/dev/shm) for the peer that keeps files there."""

    name: str
    gib: float
    replicas: int
    directory: Path
    logs: Path


@dataclass(frozen=True)
class PeerRound:
    """Seconds of one sync; `pause` is the longest of a replica, 0 where the peer's replicas generate nothing."""

    seconds: float
    pause: float


class PeerSession:
    """States: made -> started -> closed."""

    def __init__(self, plan: PeerPlan) -> None:
        self._plan = plan
        self._workers: list[WorkerProcess] = []
        self._next = 1

    async def start(self) -> None:
        """Start the processes and warm them up."""
        alone = PEERS[self._plan.name].order == "alone"
        names = ["cluster"] if alone else ["trainer", *(f"replica-{i}" for i in range(self._plan.replicas))]
        starting = [
            asyncio.ensure_future(WorkerProcess.start(PROCESS, self._setup(name, rank), self._plan.logs))
            for rank, name in enumerate(names)
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            await asyncio.wait(starting)
            self._workers = [task.result() for task in starting if task.exception() is None]
        for _ in range(WARM_UPS):
            await self.sync()

    async def sync(self) -> PeerRound:
        """One measured sync, and the check, outside the measured time, that it has arrived.

        Raises:
            SyncError: it has not, or a process failed.
        """
        version, self._next = self._next, self._next + 1
        trainer, replicas = self._workers[0], self._workers[1:]
        order = PEERS[self._plan.name].order
        began = time.perf_counter()
        if order == "together":
            pauses = await self._sync_all([trainer, *replicas], version)
        else:
            pauses = await self._sync_all([trainer], version)
            pauses += await self._sync_all(replicas, version)
        seconds = time.perf_counter() - began
        for worker in replicas or [trainer]:
            await worker.call(m.PeerCheck(version), m.Done)
        return PeerRound(seconds, max(pauses))

    async def close(self) -> None:
        """End the processes."""
        for worker in reversed(self._workers):
            await worker.stop()
        self._workers = []

    async def _sync_all(self, workers: list[WorkerProcess], version: int) -> list[float]:
        done = await asyncio.gather(*(worker.call(m.PeerSync(version), m.Seconds) for worker in workers))
        return [reply.seconds for reply in done]

    def _setup(self, name: str, rank: int) -> m.SetUp:
        plan = self._plan
        return m.SetUp(
            name=name,
            gib=plan.gib,
            directory=str(plan.directory),
            threads=1,
            peer=plan.name,
            rank=rank,
            replicas=plan.replicas,
        )
