"""Hosts that stand still at a named point of a sync, so that a killer outside can strike exactly there.

`PACELINE_HOLD_DIR` is a directory. Whoever wants to strike writes `POINT ROLE` into its file `wanted` (`*` for any
role). The process of this role that comes to this point next writes its pid into `reached` and goes on once `wanted`
is gone, or after `HOLD_SECONDS`. While there is a file `pace`, each sync begins `PACE_SECONDS` later, so that a run
lives as long as its killer needs. Without these files nothing is slower. A run gets these hosts by its table of hosts.

Points, in the order of a sync: `idle` (before it), `capture`, `encode`, `stage` (asked for), `staged` (the reply is on
its way), `swap` (asked for), `bind` and `bound` (inside the pause, before and after the pointers are moved), `swapped`
(the reply is on its way), `confirm`, `queue_version`, `rollout_version`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.object_transport import ObjectTransport
from paceline.core.ports import InferenceEngine
from paceline.runtime import registry
from paceline.runtime.host_actor import HOSTS
from paceline.runtime.hosts.queue_host import QueueHost
from paceline.runtime.hosts.replica_host import ReplicaHost
from paceline.runtime.hosts.rollouter_host import RollouterHost
from paceline.runtime.hosts.synchronizer_host import SynchronizerHost
from paceline.runtime.hosts.trainer_host import TrainerHost
from paceline.runtime.spec import RunSpec

HOLD_DIR = "PACELINE_HOLD_DIR"
HOLD_SECONDS = 10.0
PACE_SECONDS = 1.0
POLL_SECONDS = 0.005
POINTS = (
    "idle",
    "capture",
    "encode",
    "stage",
    "staged",
    "swap",
    "bind",
    "bound",
    "swapped",
    "confirm",
    "queue_version",
    "rollout_version",
)

HELD_HOSTS = {
    **HOSTS,
    **{
        kind: f"benchmarks.held_hosts:Held{name}Host"
        for kind, name in {
            "message_queue": "Queue",
            "synchronizer": "Synchronizer",
            "rollouter": "Rollouter",
            "trainer": "Trainer",
            "replica": "Replica",
        }.items()
    },
}


class Holder:
    """The points of one process."""

    def __init__(self, role: str) -> None:
        self._directory = Path(os.environ[HOLD_DIR])
        self._role = role

    async def at(self, point: str) -> None:
        """Come to a point; the event loop goes on meanwhile."""
        if point == "idle" and (self._directory / "pace").exists():
            await asyncio.sleep(PACE_SECONDS)
        await asyncio.to_thread(self.inside, point)

    def inside(self, point: str) -> None:
        """Come to a point within a step: the process stands still."""
        until = self._until(point)
        while self._is_held(until):
            time.sleep(POLL_SECONDS)

    def _until(self, point: str) -> float:
        try:
            wanted = (self._directory / "wanted").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return 0.0
        if wanted[:1] != [point] or wanted[1] not in ("*", self._role):
            return 0.0
        part = self._directory / f"reached.{os.getpid()}"
        part.write_text(str(os.getpid()), encoding="utf-8")
        part.replace(self._directory / "reached")
        return time.monotonic() + HOLD_SECONDS

    def _is_held(self, until: float) -> bool:
        return time.monotonic() < until and (self._directory / "wanted").exists()


class _Held:
    """A host whose methods come to points before or after they do their work."""

    def __init__(self, host: Any, role: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        self._host = host
        self._holder = Holder(role)
        self._before = before
        self._after = after

    def __getattr__(self, method: str) -> Any:
        work = getattr(self._host, method)
        if method not in self._before and method not in self._after:
            return work

        async def call(*arguments: Any, **keywords: Any) -> Any:
            if method in self._before:
                await self._holder.at(self._before[method])
            result = await work(*arguments, **keywords)
            if method in self._after:
                await self._holder.at(self._after[method])
            return result

        return call


class HeldEngine:
    """An engine that comes to points around `bind`."""

    def __init__(self, engine: InferenceEngine, holder: Holder) -> None:
        self._engine = engine
        self._holder = holder

    def bind(self, tensors: Mapping[str, Any], version: int) -> None:
        """See `InferenceEngine`."""
        self._holder.inside("bind")
        self._engine.bind(tensors, version)
        self._holder.inside("bound")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def HeldQueueHost(spec: RunSpec, role: str) -> Any:
    """The message queue's host."""
    return _Held(QueueHost(spec, role), role, {"update_param_version": "queue_version"}, {})


def HeldSynchronizerHost(spec: RunSpec, role: str) -> Any:
    """The synchronizer's host."""
    return _Held(SynchronizerHost(spec, role), role, {"sync_weights": "idle"}, {})


def HeldRollouterHost(spec: RunSpec, role: str) -> Any:
    """The rollouter's host."""
    before = {"confirm_replicas": "confirm", "update_param_version": "rollout_version"}
    return _Held(RollouterHost(spec, role), role, before, {})


def HeldTrainerHost(spec: RunSpec, role: str, objects: ObjectTransport) -> Any:
    """The trainer's host."""
    before = {"capture_weights": "capture", "publish_weights": "encode"}
    return _Held(TrainerHost(spec, role, objects), role, before, {})


def HeldReplicaHost(spec: RunSpec, role: str, objects: ObjectTransport) -> Any:
    """A replica's host; its engines come to points, too."""
    build = registry.engine_factory
    holder = Holder(role)

    def engine_factory(spec: RunSpec, replica_id: str, threads: int) -> Callable[[], InferenceEngine]:
        make = build(spec, replica_id, threads)
        return lambda: HeldEngine(make(), holder)

    registry.engine_factory = engine_factory  # this process has one replica and no other use for it
    return _Held(
        ReplicaHost(spec, role, objects),
        role,
        {"stage": "stage", "swap": "swap"},
        {"stage": "staged", "swap": "swapped"},
    )
