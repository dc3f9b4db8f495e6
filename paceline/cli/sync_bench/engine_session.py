"""The engine's road, measured: a trainer process, as many replica processes as the largest row needs, the real manager.

A round with N replicas uses the first N; the others are paused and do not take part. They catch up afterwards, outside
the measured time, so that two arenas are enough. The measured time runs from the order to publish to the confirmation
of the last replica, as `CheckpointEngineManager.update_weights` does it.

States: made -> started -> (paused for a peer <-> running) -> closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import CALL_SECONDS, WorkerProcess
from paceline.cli.sync_bench.memory_use import memory_of
from paceline.cli.sync_bench.model_shapes import PROBE_BYTES, shapes_of
from paceline.cli.sync_bench.worker_ports import NoEvents, RemoteReplica, RemoteTrainer, Worker
from paceline.core.config import Config
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.sections.checkpoint_engine import CheckpointEngineConfig
from paceline.core.version import Version
from paceline.runtime.system import SystemClock
from paceline.store.serving_table import hash_served
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate

if TYPE_CHECKING:
    from paceline.cli.sync_bench.ray_workers import RayWorkers

PUBLISHER = "paceline.cli.sync_bench.publisher_process"
REPLICA = "paceline.cli.sync_bench.replica_process"
_MEMORY_SECONDS = 0.02
WARM_UPS = 2  # one for each arena


def shares_bytes(engine: m.Engine, mode: m.Mode) -> bool:
    """Whether the replicas of a node stage the same bytes, of which one takes the digest for all."""
    return engine == "shared_memory" or (engine == "ray_object" and mode == "full")


@dataclass(frozen=True)
class SessionPlan:
    """What a session measures. `directory` is for its sockets and tables, `in_memory` for files of weights, `logs` for
    what its processes write.
    """

    gib: float
    engine: m.Engine
    mode: m.Mode
    apply: m.Apply
    replicas: tuple[int, ...]
    threads: int
    directory: Path
    in_memory: Path
    logs: Path


@dataclass(frozen=True)
class SyncRound:
    """One measured sync. `rate` is the plain copy measured just before it; `phases` are the manager's; `taken` are the
    bytes that each replica took from what was published.
    """

    seconds: float
    nbytes: int
    taken: tuple[int, ...]
    rate: m.CopyRate
    phases: dict[str, float]
    pauses: tuple[m.PauseRecord, ...]


class EngineSession:
    """Trainer and replicas of one engine, sending in one mode."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._clock = SystemClock()
        # As many swaps at a time as there are cores: more would only wait for each other with their sequences paused.
        engine = CheckpointEngineConfig(
            sync_timeout_seconds=CALL_SECONDS, update_order="rolling", rolling_size=plan.threads
        )
        self._config = Config(checkpoint_engine=engine)
        self._workers: Sequence[Worker] = []
        self._ray: RayWorkers | None = None
        self._trainer: RemoteTrainer | None = None
        self._replicas: list[RemoteReplica] = []
        self._next = 1

    async def start(self) -> None:
        """Start all processes, bring every replica to a version, warm both arenas."""
        setups = [self._setup("trainer")] + [self._setup(f"replica-{i}") for i in range(max(self._plan.replicas))]
        await (self._start_ray(setups) if self._plan.engine == "ray_object" else self._start_processes(setups))
        self._trainer = RemoteTrainer(self._workers[0])
        self._replicas = [RemoteReplica(worker) for worker in self._workers[1:]]
        for index in range(WARM_UPS):
            await self._train()
            await self._update(len(self._replicas))
            if index == 0:
                await self._tell(self._replicas, m.Generate())

    async def _start_processes(self, setups: Sequence[m.SetUp]) -> None:
        modules = [PUBLISHER] + [REPLICA] * (len(setups) - 1)
        starting = [
            asyncio.ensure_future(WorkerProcess.start(module, setup, self._plan.logs))
            for module, setup in zip(modules, setups, strict=True)
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            await asyncio.wait(starting)
            self._workers = [task.result() for task in starting if task.exception() is None]

    async def _start_ray(self, setups: Sequence[m.SetUp]) -> None:
        from paceline.cli.sync_bench.ray_workers import RayWorkers

        model_bytes = shapes_of(self._plan.gib).nbytes
        private = self._plan.directory.parent  # the benchmark's: the names of Ray's sockets must not get too long
        self._ray = RayWorkers.start_ray(len(setups), model_bytes, private)  # nothing else runs yet
        self._workers = await self._ray.launch(list(setups))

    async def pause(self) -> None:
        """Let no replica decode, so that a peer has the machine."""
        await self._tell(self._replicas, m.Pause())

    async def sync(self, replicas: int) -> SyncRound:
        """One measured round with the first `replicas`.

        Raises:
            SyncError: a replica was left behind or its proof is not the published digest.
        """
        used = self._replicas[:replicas]
        await self._tell(self._replicas[replicas:], m.Pause())
        await self._tell(used, m.Resume())
        await self._train()
        rate = await self._publisher.call(m.Memcpy(), m.CopyRate)
        began = time.perf_counter()
        update = await self._update(replicas)
        seconds = time.perf_counter() - began
        pauses = await asyncio.gather(*(replica.worker.call(m.LastPause(), m.PauseRecord) for replica in used))
        manifest = update.manifest
        await self._catch_up(replicas, manifest)
        taken = tuple(report.bytes for report in update.staged.values())
        return SyncRound(seconds, manifest.total_bytes, taken, rate, update.phases, tuple(pauses))

    async def capture_parts(self) -> m.CaptureParts:
        """What digest and guard add to a capture."""
        return await self._publisher.call(m.SplitCapture(), m.CaptureParts)

    async def digest_seconds(self, replicas: int) -> float:
        """What hashing adds to a sync behind the capture: of what is staged, once per node where replicas share it and
        in each where they do not, and in the copies that prove themselves.
        """
        stagers = self._replicas[: 1 if shares_bytes(self._plan.engine, self._plan.mode) else replicas]
        seconds = await self._longest(stagers, m.TakeDigest(self._plan.threads))
        if self._plan.apply == "copied":
            seconds += await self._longest(self._replicas[:replicas], m.TakeProof())
        return seconds

    async def _longest(self, replicas: Sequence[RemoteReplica], request: m.Request) -> float:
        calls = [replica.worker.call(request, m.Seconds) for replica in replicas]
        return max(taken.seconds for taken in await asyncio.gather(*calls))

    async def peak_memory(self, replicas: int) -> int:
        """Most bytes of the trainer, the first `replicas` and the arenas, seen during a sync that is not timed.

        The buffers of the plain copy are left out.
        """
        await self._train()
        pids = [worker.pid for worker in self._workers]
        updating = asyncio.ensure_future(self._update(replicas))
        peak = 0
        while not updating.done():
            await asyncio.wait({updating}, timeout=_MEMORY_SECONDS)
            peak = max(peak, await asyncio.to_thread(memory_of, pids[: 1 + replicas], pids))
        manifest = updating.result().manifest
        await self._catch_up(replicas, manifest)
        return peak - 2 * min(PROBE_BYTES, manifest.total_bytes)

    async def check_from_outside(self) -> str:
        """Hash what every replica serves, from its memory; the digest.

        Raises:
            DigestMismatch: they do not all serve the same.
        """
        paths = [str(self._plan.directory / f"{replica.replica_id}.json") for replica in self._replicas]
        served = {await asyncio.to_thread(hash_served, path, CALL_SECONDS) for path in paths}
        newest = Version(m.LIFE, self._next - 1).packed
        if len(served) != 1 or next(iter(served))[0] != newest:
            raise DigestMismatch(f"replicas serve {sorted(served)}, not one digest of version {newest}")
        return next(iter(served))[1]

    async def close(self) -> None:
        """End all processes, replicas first: they hold leases."""
        for worker in reversed(self._workers):
            await worker.stop()
        self._workers = []
        if self._ray is not None:
            await asyncio.to_thread(self._ray.stop)
            self._ray = None

    async def _update(self, replicas: int) -> WeightUpdate:
        assert self._trainer is not None
        version = Version(m.LIFE, self._next)
        self._next += 1
        manager = CheckpointEngineManager(
            self._config, self._trainer, self._replicas[:replicas], clock=self._clock, events=NoEvents()
        )
        update = await manager.update_weights(version.n, version=version.packed)
        if update.fenced or not update.verified:
            raise SyncError("; ".join(update.fenced.values()) or f"version {version} was not verified")
        self._trainer.base = version.packed
        return update

    async def _train(self) -> None:
        await self._publisher.call(m.Train(self._next), m.Done)

    async def _catch_up(self, replicas: int, manifest: WeightManifest) -> None:
        """Bring those that took no part to the same version, so that the older arena is free."""
        for replica in self._replicas[replicas:]:
            await replica.take(manifest, self._clock.wall() + CALL_SECONDS)

    @property
    def _publisher(self) -> Worker:
        return self._workers[0]

    def _setup(self, name: str) -> m.SetUp:
        plan = self._plan
        return m.SetUp(
            name=name,
            gib=plan.gib,
            directory=str(plan.directory),
            threads=plan.threads,
            apply=plan.apply,
            engine=plan.engine,
            mode=plan.mode,
            in_memory=str(plan.in_memory),
        )

    async def _tell(self, replicas: Sequence[RemoteReplica], request: m.Request) -> None:
        await asyncio.gather(*(replica.worker.call(request, m.Done) for replica in replicas))
