"""Both ends of each checkpoint engine with deltas on, and a way to damage the delta that lies between them."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from typing import Protocol

import fsspec

from paceline.checkpoint_engine.delta_sending import DeltaMode
from paceline.checkpoint_engine.filesystem import FilesystemReceiver, FilesystemSender
from paceline.checkpoint_engine.filesystem_format import DELTA_NAME
from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.checkpoint_engine.ray_object import PREFIX, RayObjectReceiver, RayObjectSender
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.runtime.system import SystemClock
from paceline.testing.object_transport import InProcessObjects, ObjectCluster


class DeltaLink(Protocol):
    """Made with the sender's mode."""

    @property
    def sender(self) -> WeightSender: ...

    def receiver(self) -> WeightReceiver: ...

    def flip(self, manifest: WeightManifest, byte: int) -> None:
        """Flip the lowest bit of this byte of the delta."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    def __init__(self, mode: DeltaMode) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.sender = SharedMemorySender(directory=self._directory.name, arenas=4, nonfinite="off", delta=mode)

    def receiver(self) -> WeightReceiver:
        return SharedMemoryReceiver(holder="replica-0", deadline_seconds=60)

    def flip(self, manifest: WeightManifest, byte: int) -> None:
        store = self.sender._store  # noqa: SLF001
        assert store is not None
        assert manifest.delta is not None
        arena = next(arena for arena in store._arenas if arena.arena_id == manifest.arena_id)  # noqa: SLF001
        assert arena.begin_write()
        arena.array[manifest.delta.offset + byte] ^= 1
        arena.end_write(manifest.version)

    def close(self) -> None:
        self.sender.close()
        self._directory.cleanup()


class InProcess:
    def __init__(self, mode: DeltaMode) -> None:
        self._exchange = InProcessExchange()
        self.sender = InProcessSender(self._exchange, arenas=4, dtype=None, nonfinite="off", delta=mode)

    def receiver(self) -> WeightReceiver:
        return InProcessReceiver(self._exchange, holder="replica-0", verify="full")

    def flip(self, manifest: WeightManifest, byte: int) -> None:
        arena = self._exchange.arenas[manifest.arena_id]
        arena.delta = arena.delta[:byte] + bytes([arena.delta[byte] ^ 1]) + arena.delta[byte + 1 :]

    def close(self) -> None:
        self.sender.close()


class RayObject:
    def __init__(self, mode: DeltaMode) -> None:
        self.cluster = ObjectCluster()
        self.sender = RayObjectSender(
            InProcessObjects(self.cluster, "first"), arenas=4, dtype=None, nonfinite="off", threads=1, delta=mode
        )

    def receiver(self) -> WeightReceiver:
        objects = InProcessObjects(self.cluster, "second")
        return RayObjectReceiver(objects, holder="replica-0", verify="full", deadline_seconds=60)

    def flip(self, manifest: WeightManifest, byte: int) -> None:
        assert manifest.delta is not None
        self.cluster.objects[bytes.fromhex(manifest.delta.arena_id.removeprefix(PREFIX))].data[byte] ^= 1

    def close(self) -> None:
        self.sender.close()


class Filesystem:
    def __init__(self, mode: DeltaMode, url: str = "", full_every: int = 4, keep: int = 4) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.url = url or f"{self._directory.name}/weights"
        self.sender = FilesystemSender(
            url=self.url,
            clock=SystemClock(),
            keep_versions=keep,
            keep_seconds=0,
            nonfinite="off",
            delta=mode,
            full_every=full_every,
        )

    def receiver(self) -> WeightReceiver:
        return FilesystemReceiver(url=self.url, holder="replica-0", deadline_seconds=60, clock=SystemClock())

    def flip(self, manifest: WeightManifest, byte: int) -> None:
        name = f"{self.url}/{manifest.arena_id}/{DELTA_NAME}"
        with fsspec.open(name, "rb") as file:
            data = bytearray(file.read())
        data[byte] ^= 1
        with fsspec.open(name, "wb") as file:
            file.write(bytes(data))

    def close(self) -> None:
        self.sender.close()
        self._directory.cleanup()


def object_store(mode: DeltaMode) -> Filesystem:
    """The same engine over an fsspec file system without locks or renames."""
    return Filesystem(mode, f"memory://{secrets.token_hex(8)}/weights")


# Engines whose replicas map the full version: a delta is for those alone that own their memory.
MAPPING: dict[str, Callable[[DeltaMode], DeltaLink]] = {"shared_memory": SharedMemory, "in_process": InProcess}
# Engines that build a version from its base.
BUILDING: dict[str, Callable[[DeltaMode], DeltaLink]] = {
    "ray_object": RayObject,
    "filesystem": Filesystem,
    "object_store": object_store,
}
DELTA_LINKS: dict[str, Callable[[DeltaMode], DeltaLink]] = {**MAPPING, **BUILDING}
