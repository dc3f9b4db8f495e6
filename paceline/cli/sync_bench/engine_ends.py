"""Both ends of the measured engine, made from what the benchmark's processes are told.

Files of weights lie in memory (/dev/shm), so that no disk is measured; nothing is kept longer than it must.
"""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint_engine.filesystem import FilesystemReceiver, FilesystemSender
from paceline.checkpoint_engine.ray_object import RayObjectReceiver, RayObjectSender
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.cli.sync_bench.messages import SetUp
from paceline.core.errors import SyncError
from paceline.core.object_transport import ObjectTransport
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.runtime.system import SystemClock
from paceline.store.node_digests import NodeDigests

ARENAS = 2


def make_sender(setup: SetUp, objects: ObjectTransport | None) -> WeightSender:
    """The trainer's end. `objects` is for `ray_object` alone."""
    if setup.engine == "filesystem":
        return FilesystemSender(
            url=_url(setup),
            keep_versions=ARENAS,
            keep_seconds=0.0,
            nonfinite="error",
            threads=setup.threads,
            clock=SystemClock(),
            delta=setup.mode,
        )
    if setup.engine == "ray_object":
        return RayObjectSender(
            _given(objects),
            arenas=ARENAS,
            dtype=None,
            nonfinite="error",
            threads=setup.threads,
            delta=setup.mode,
        )
    return SharedMemorySender(
        directory=setup.directory, arenas=ARENAS, nonfinite="error", threads=setup.threads, delta=setup.mode
    )


def make_receiver(setup: SetUp, objects: ObjectTransport | None) -> WeightReceiver:
    """A replica's end; every version is verified in full."""
    if setup.engine == "filesystem":
        return FilesystemReceiver(
            url=_url(setup),
            holder=setup.name,
            verify="full",
            deadline_seconds=CALL_SECONDS,
            clock=SystemClock(),
            threads=setup.threads,
        )
    if setup.engine == "ray_object":
        return RayObjectReceiver(
            _given(objects),
            holder=setup.name,
            verify="full",
            deadline_seconds=CALL_SECONDS,
            threads=setup.threads,
            digests=NodeDigests(str(Path(setup.directory) / "digests")),
        )
    return SharedMemoryReceiver(holder=setup.name, verify="full", deadline_seconds=CALL_SECONDS, threads=setup.threads)


def _url(setup: SetUp) -> str:
    return str(Path(setup.in_memory) / "weights")


def _given(objects: ObjectTransport | None) -> ObjectTransport:
    if objects is None:
        raise SyncError("ray_object is measured in processes of a Ray cluster")
    return objects
