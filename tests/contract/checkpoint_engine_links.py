"""The checkpoint engines under contract: both ends of each. A new engine adds its link here."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import fsspec
import torch

from paceline.checkpoint_engine.filesystem import FilesystemReceiver, FilesystemSender
from paceline.checkpoint_engine.filesystem_format import plan_shards, shard_name, shard_of
from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.checkpoint_engine.ray_object import PREFIX, RayObjectReceiver, RayObjectSender
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.runtime.system import SystemClock
from paceline.testing.object_transport import InProcessObjects, ObjectCluster

Named = list[tuple[str, torch.Tensor]]


class Link(Protocol):
    """Both ends of one engine, and a way to damage what lies between them. Add an engine: add its link to `LINKS`."""

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> WeightSender: ...

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver: ...

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        """Flip one bit of the published bytes."""
        ...

    def close(self) -> None: ...


class SharedMemoryLink:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._senders: list[SharedMemorySender] = []

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> WeightSender:
        made = SharedMemorySender(
            directory=self._directory.name,
            arenas=arenas,
            dtype=dtype,
            nonfinite=nonfinite,
            threads=2,
            keep=keep,
            any_value=any_value,
        )
        self._senders.append(made)
        return made

    def receiver(
        self, holder: str = "replica-0", verify: Literal["full", "off"] = "full", deadline_seconds: float = 60
    ) -> WeightReceiver:
        return SharedMemoryReceiver(holder=holder, verify=verify, deadline_seconds=deadline_seconds)

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        store = self._senders[-1]._store  # noqa: SLF001
        assert store is not None
        arena = next(arena for arena in store._arenas if arena.arena_id == manifest.arena_id)  # noqa: SLF001
        assert arena.begin_write()
        arena.array[byte] ^= 1 << bit
        arena.end_write(manifest.version)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        assert list(Path(self._directory.name).iterdir()) == []
        self._directory.cleanup()


class InProcessLink:
    def __init__(self) -> None:
        self._exchange = InProcessExchange()

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> WeightSender:
        return InProcessSender(
            self._exchange, arenas=arenas, dtype=dtype, nonfinite=nonfinite, keep=keep, any_value=any_value
        )

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver:
        return InProcessReceiver(self._exchange, holder=holder, verify=verify)

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        self._exchange.arenas[manifest.arena_id].buffer[byte] ^= 1 << bit

    def close(self) -> None:
        self._exchange.arenas.clear()


class FilesystemLink:
    """One root; `arenas` is the number of versions kept, all tensors of these tests but the largest share a shard."""

    def __init__(self, url: str = "", shard_bytes: int = 1 << 20) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._shard_bytes = shard_bytes
        self._url = url or f"{self._directory.name}/weights"
        self._senders: list[FilesystemSender] = []

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> WeightSender:
        made = FilesystemSender(
            url=self._url,
            keep_versions=arenas,
            keep_seconds=0,
            shard_bytes=self._shard_bytes,
            dtype=dtype,
            nonfinite=nonfinite,
            threads=2,
            clock=SystemClock(),
            keep=keep,
            any_value=any_value,
        )
        self._senders.append(made)
        return made

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver:
        return FilesystemReceiver(
            url=self._url, holder=holder, verify=verify, deadline_seconds=60, clock=SystemClock(), threads=2
        )

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        shards = plan_shards(manifest.tensors, self._shard_bytes)
        for index, tensors in enumerate(shards):
            for meta, place in shard_of(tensors).places:
                if meta.offset <= byte < meta.offset + meta.nbytes:
                    name = f"{manifest.arena_id}/{shard_name(index, len(shards))}"
                    self.flip_in_file(name, place + byte - meta.offset, bit)
                    return
        raise AssertionError("the byte is in no tensor")

    def flip_in_file(self, name: str, byte: int, bit: int) -> None:
        with fsspec.open(f"{self._url}/{name}", "rb") as file:
            data = bytearray(file.read())
        data[byte] ^= 1 << bit
        with fsspec.open(f"{self._url}/{name}", "wb") as file:
            file.write(bytes(data))

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._directory.cleanup()


class ObjectStoreLink(FilesystemLink):
    """The same engine over an fsspec file system without locks, renames or free space."""

    def __init__(self, shard_bytes: int = 1 << 20) -> None:
        super().__init__(f"memory://{secrets.token_hex(8)}/weights", shard_bytes)


class RayObjectLink:
    """A sender on one node and receivers on another, over the object store inside this process."""

    def __init__(self) -> None:
        self.cluster = ObjectCluster()

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> WeightSender:
        return RayObjectSender(
            InProcessObjects(self.cluster, "first"),
            arenas=arenas,
            dtype=dtype,
            nonfinite=nonfinite,
            threads=2,
            keep=keep,
            any_value=any_value,
        )

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver:
        objects = InProcessObjects(self.cluster, "second")
        return RayObjectReceiver(objects, holder=holder, verify=verify, deadline_seconds=60)

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        stored = self.cluster.objects[bytes.fromhex(manifest.arena_id.removeprefix(PREFIX))]
        stored.data[byte] ^= 1 << bit

    def close(self) -> None:
        self.cluster.objects.clear()


# Engines whose receivers map what the sender wrote: a version that is staged somewhere is held.
MAPPED: dict[str, Callable[[], Link]] = {
    "shared_memory": SharedMemoryLink,
    "in_process": InProcessLink,
    "ray_object": RayObjectLink,
}
# Of these, engines whose versions are never written again: each has an arena of its own.
WRITTEN_ONCE = (RayObjectLink,)
# Engines whose receivers copy: nobody holds anything.
COPIED: dict[str, Callable[[], Link]] = {"filesystem": FilesystemLink, "object_store": ObjectStoreLink}
LINKS: dict[str, Callable[[], Link]] = {**MAPPED, **COPIED}


def link_with_buckets(kind: str, bucket_bytes: int) -> Link:
    """The link of an engine; the size of what it sends at a time counts where an engine has one."""
    if kind == "filesystem":
        return FilesystemLink(shard_bytes=bucket_bytes)
    return ObjectStoreLink(bucket_bytes) if kind == "object_store" else LINKS[kind]()
