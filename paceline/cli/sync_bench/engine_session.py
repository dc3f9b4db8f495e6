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

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import CALL_SECONDS, WorkerProcess
from paceline.cli.sync_bench.memory_use import memory_of
from paceline.cli.sync_bench.model_shapes import PROBE_BYTES
from paceline.cli.sync_bench.worker_ports import NoEvents, RemoteReplica, RemoteTrainer
from paceline.core.config import Config
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.sections.checkpoint_engine import CheckpointEngineConfig
from paceline.core.version import Version
from paceline.runtime.system import SystemClock
from paceline.store.serving_table import hash_served
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate

PUBLISHER = "paceline.cli.sync_bench.publisher_process"
REPLICA = "paceline.cli.sync_bench.replica_process"
_MEMORY_SECONDS = 0.02
WARM_UPS = 2  # one for each arena


@dataclass(frozen=True)
class SessionPlan:
    """What a session measures. `directory` is for its sockets and tables, `logs` for what its processes write."""

    gib: float
    apply: m.Apply
    replicas: tuple[int, ...]
    threads: int
    directory: Path
    logs: Path


@dataclass(frozen=True)
class SyncRound:
    """One measured sync. `rate` is the plain copy measured just before it; `phases` are the manager's."""

    seconds: float
    nbytes: int
    rate: m.CopyRate
    phases: dict[str, float]
    pauses: tuple[m.PauseRecord, ...]


class EngineSession:
    """Trainer and replicas of the `shared_memory` engine."""

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._clock = SystemClock()
        self._config = Config(checkpoint_engine=CheckpointEngineConfig(sync_timeout_seconds=CALL_SECONDS))
        self._workers: list[WorkerProcess] = []
        self._trainer: RemoteTrainer | None = None
        self._replicas: list[RemoteReplica] = []
        self._next = 1

    async def start(self) -> None:
        """Start all processes, bring every replica to a version, warm both arenas."""
        setups = [self._setup("trainer")] + [self._setup(f"replica-{i}") for i in range(max(self._plan.replicas))]
        modules = [PUBLISHER] + [REPLICA] * max(self._plan.replicas)
        starting = [
            asyncio.ensure_future(WorkerProcess.start(module, setup, self._plan.logs))
            for module, setup in zip(modules, setups, strict=True)
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            await asyncio.wait(starting)
            self._workers = [task.result() for task in starting if task.exception() is None]
        self._trainer = RemoteTrainer(self._workers[0])
        self._replicas = [RemoteReplica(worker) for worker in self._workers[1:]]
        for index in range(WARM_UPS):
            await self._update(len(self._replicas))
            if index == 0:
                await self._tell(self._replicas, m.Generate())

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
        rate = await self._publisher.call(m.Memcpy(), m.CopyRate)
        began = time.perf_counter()
        update = await self._update(replicas)
        seconds = time.perf_counter() - began
        pauses = await asyncio.gather(*(replica.worker.call(m.LastPause(), m.PauseRecord) for replica in used))
        manifest = update.capture.manifest
        await self._catch_up(replicas, manifest)
        return SyncRound(seconds, manifest.total_bytes, rate, update.phases, tuple(pauses))

    async def capture_parts(self) -> m.CaptureParts:
        """What digest and guard add to a capture."""
        return await self._publisher.call(m.SplitCapture(), m.CaptureParts)

    async def digest_seconds(self, replicas: int) -> float:
        """What hashing adds to a sync behind the capture: once per node, and in the proof of each copied replica."""
        once = await self._replicas[0].worker.call(m.TakeDigest(self._plan.threads), m.Seconds)
        if self._plan.apply == "mapped":
            return once.seconds
        calls = [replica.worker.call(m.TakeDigest(1), m.Seconds) for replica in self._replicas[:replicas]]
        return once.seconds + max(proof.seconds for proof in await asyncio.gather(*calls))

    async def peak_memory(self, replicas: int) -> int:
        """Most bytes of the trainer, the first `replicas` and the arenas, seen during a sync that is not timed.

        The buffers of the plain copy are left out.
        """
        pids = [worker.pid for worker in self._workers]
        updating = asyncio.ensure_future(self._update(replicas))
        peak = 0
        while not updating.done():
            await asyncio.wait({updating}, timeout=_MEMORY_SECONDS)
            peak = max(peak, await asyncio.to_thread(memory_of, pids[: 1 + replicas], pids))
        manifest = updating.result().capture.manifest
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
        return update

    async def _catch_up(self, replicas: int, manifest: WeightManifest) -> None:
        """Bring those that took no part to the same version, so that the older arena is free."""
        for replica in self._replicas[replicas:]:
            await replica.take(manifest, self._clock.wall() + CALL_SECONDS)

    @property
    def _publisher(self) -> WorkerProcess:
        return self._workers[0]

    def _setup(self, name: str) -> m.SetUp:
        plan = self._plan
        return m.SetUp(name=name, gib=plan.gib, directory=str(plan.directory), threads=plan.threads, apply=plan.apply)

    async def _tell(self, replicas: Sequence[RemoteReplica], request: m.Request) -> None:
        await asyncio.gather(*(replica.worker.call(request, m.Done) for replica in replicas))
