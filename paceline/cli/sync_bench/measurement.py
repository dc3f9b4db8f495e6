"""The order of a whole measurement: sessions one after another, rounds within a session in turns.

One session for each engine, mode and way to apply; its rounds go through all numbers of replicas. Each peer in turn is
started beside the first session, and its rounds alternate with the engine's at the same number of replicas; only one
peer has processes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.sync_bench.engine_session import EngineSession, SessionPlan, SyncRound
from paceline.cli.sync_bench.figures import Costs, PeerRow, SyncRow, Way, peer_row, sync_row
from paceline.cli.sync_bench.messages import CopyRate
from paceline.cli.sync_bench.peer_session import PeerPlan, PeerSession
from paceline.runtime.ray_environment import prepare_environment

PEER_REPLICAS = 4


@dataclass(frozen=True)
class MeasurementPlan:
    """What is asked for. `home` is a directory on disk, `in_memory` one in /dev/shm, both of this benchmark alone."""

    gib: float
    replicas: tuple[int, ...]
    ways: tuple[Way, ...]
    peers: tuple[str, ...]
    rounds: int
    threads: int
    home: Path
    in_memory: Path

    @property
    def peer_replicas(self) -> int:
        """Replicas of the peers: four, or as many as there are at most."""
        return min(PEER_REPLICAS, max(self.replicas))


@dataclass
class Measured:
    """All rows, and every rate of a plain copy on the way."""

    rows: list[SyncRow]
    peers: list[PeerRow]
    rates: list[CopyRate]


class Measurement:
    """Runs a plan; `progress` is told of each row as soon as it is there."""

    def __init__(self, plan: MeasurementPlan, progress: Callable[[SyncRow | PeerRow], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._measured = Measured([], [], [])

    async def run(self) -> Measured:
        """Everything.

        Raises:
            PacelineError: a process failed, did not answer in time, or its weights were not those published.
        """
        if any(way.engine == "ray_object" for way in self._plan.ways):
            prepare_environment(self._plan.home)  # before ray is imported, which reads it once
        for index, way in enumerate(self._plan.ways):
            session = EngineSession(self._session_plan(way))
            try:
                await session.start()
                await self._measure_engine(session, way)
                if index == 0:
                    for name in self._plan.peers:
                        await self._measure_peer(session, name)
                await session.check_from_outside()
            finally:
                await session.close()
        return self._measured

    async def _measure_engine(self, session: EngineSession, way: Way) -> None:
        rounds: dict[int, list[SyncRound]] = {count: [] for count in self._plan.replicas}
        for _ in range(self._plan.rounds):
            for count, done in rounds.items():
                done.append(await self._engine_round(session, count))
        parts = await session.capture_parts()
        first = rounds[min(rounds)]
        for count, done in rounds.items():
            costs = Costs(parts, await session.digest_seconds(count), await session.peak_memory(count))
            row = sync_row(way, count, done, first, costs)
            self._measured.rows.append(row)
            self._progress(row)

    async def _measure_peer(self, session: EngineSession, name: str) -> None:
        count = self._plan.peer_replicas
        plan = PeerPlan(name, self._plan.gib, count, self._peer_directory(name), self._logs())
        peer = PeerSession(plan)
        try:
            await session.pause()
            await peer.start()
            engine, rounds = [], []
            for _ in range(self._plan.rounds):
                engine.append(await self._engine_round(session, count))
                await session.pause()
                rounds.append(await peer.sync())
        finally:
            await peer.close()
        row = peer_row(name, count, rounds, engine)
        self._measured.peers.append(row)
        self._progress(row)

    async def _engine_round(self, session: EngineSession, replicas: int) -> SyncRound:
        done = await session.sync(replicas)
        self._measured.rates.append(done.rate)
        return done

    def _session_plan(self, way: Way) -> SessionPlan:
        plan = self._plan
        name = f"{way.engine}-{way.mode}-{way.apply}"
        return SessionPlan(
            gib=plan.gib,
            engine=way.engine,
            mode=way.mode,
            apply=way.apply,
            replicas=plan.replicas,
            threads=plan.threads,
            directory=_made(plan.home / name),
            in_memory=_made(plan.in_memory / name),
            logs=self._logs(),
        )

    def _peer_directory(self, name: str) -> Path:
        return _made((self._plan.in_memory if name == "safetensors_shm" else self._plan.home) / name)

    def _logs(self) -> Path:
        return _made(self._plan.home / "logs")


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def chosen_counts(text: str) -> Sequence[int]:
    """Numbers of replicas from "1,2,4,8", without repetition, smallest first; empty where it is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        return ()
    return sorted({int(part) for part in parts})
