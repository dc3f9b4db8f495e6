"""Checkpoint engine between nodes: a version is one immutable object, which crosses to a node once.

Sender: copy and digest into a buffer of its own, laid out as every arena, and put it into the object store under the
`ObjectTransport` port (Ray's, in a run). Receiver: get the object as bytes of its own node's store, without a copy, see
the tensors in it, verify, hold it. Law of memory: the newest version and those that are still held are at most
`arenas` less one when the next is put, so the store never holds more than `arenas`; beside it the sender has the one
buffer. An object is not written again, so what is held cannot change; its lease is the reference that comes with its
bytes, which ends with the last tensor over them or with the process.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from paceline.checkpoint_engine.held_weights import HeldWeights
from paceline.checkpoint_engine.verification import Verification, VerifyMode
from paceline.core.errors import ConfigError, PacelineError, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.core.object_transport import ObjectTransport
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter

ADDRESS = "ray_object"
PREFIX = "object-"


class RayObjectSender:
    """Implements `core.ports.WeightSender`. `arenas` is the number of versions that the store may hold at a time;
    `dtype`, `keep`, `nonfinite` and `threads` are those of `weights.snapshot.SnapshotWriter`.
    """

    def __init__(
        self,
        objects: ObjectTransport,
        *,
        arenas: int,
        dtype: str | None,
        nonfinite: Literal["error", "skip", "off"],
        threads: int,
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._objects = objects
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value)
        self._buffer: torch.Tensor | None = None
        self._newest: tuple[int, bytes] | None = None
        self._retired: list[bytes] = []

    def capture(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        """Publish the tensors as they are now; they may change again once this returns.

        Raises:
            CoverageError, NonFiniteWeights: see `SnapshotWriter`.
            VersionError: not above the last version.
            SyncError: so many versions are held that the store has no room, or it takes no object.
            CapacityError: at the first capture, when the store cannot hold `arenas` versions.
        """
        plan, stored = self._writer.prepare(named_tensors)
        if self._newest is not None and version <= self._newest[0]:
            raise VersionError(f"version {version} cannot follow version {self._newest[0]}")
        if holders := self.blocking_holders():
            raise SyncError(f"no free arena for version {version}: held by {', '.join(holders)}")
        if self._buffer is None:
            self._objects.check_room(self._arenas * plan.total_bytes)
            self._buffer = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        manifest = self._writer.publish(stored, self._buffer, version=version, arena_id="", address=ADDRESS)
        reference = self._objects.put(self._buffer.numpy().data)
        self._retire_newest()
        self._newest = (version, reference)
        return replace(manifest, arena_id=PREFIX + reference.hex())

    def blocking_holders(self) -> Sequence[str]:
        held = {reference: self._objects.holders(reference) for reference in self._retired}
        self._retired = [reference for reference, names in held.items() if names]
        newest = 0 if self._newest is None else 1
        if len(self._retired) + newest + 1 <= self._arenas:
            return []
        return list(dict.fromkeys(name for names in held.values() for name in names))

    def close(self) -> None:
        """Offer nothing any more; versions that are held stay as they are."""
        self._retire_newest()
        self._buffer = None

    def _retire_newest(self) -> None:
        if self._newest is not None:
            _, reference = self._newest
            self._newest = None
            self._retired.append(reference)
            self._objects.release(reference)


class RayObjectReceiver:
    """Implements `core.ports.WeightReceiver`. `holder` names it for the owner; `verify` is that of `verification`."""

    def __init__(
        self,
        objects: ObjectTransport,
        *,
        holder: str,
        verify: VerifyMode,
        deadline_seconds: float,
        threads: int = 1,
    ) -> None:
        self._objects = objects
        self._holder = holder
        self._verification = Verification(verify, holder=holder, threads=threads)
        self._deadline_seconds = deadline_seconds
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(self, manifest: WeightManifest) -> HeldWeights:
        """Get, verify, hold.

        Raises:
            SyncError: the manifest cannot be right, the version is gone, or its object is lost.
            DigestMismatch: the bytes are not those that were published.
            WorkerDied: the owner of the object is gone. DeadlineExceeded: the object did not come.
        """
        check_manifest(manifest, manifest.total_bytes)
        reference = _reference(manifest)
        try:
            data = self._objects.get(reference, holder=self._holder, deadline_seconds=self._deadline_seconds)
        except LookupError as error:
            raise SyncError(f"version {manifest.version} is gone: {error}") from error
        try:
            tensors, digest = self._verified(manifest, data)
        except BaseException as error:  # whatever ended the staging, its lease ends too
            del data
            if isinstance(error, PacelineError):
                error.__traceback__ = None  # the frames of a refusal refer to the bytes
            self._objects.done(reference, holder=self._holder)
            raise
        objects, holder = self._objects, self._holder
        staged = HeldWeights(manifest, tensors, digest, lambda: objects.done(reference, holder=holder))
        self._staged.add(staged)
        return staged

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in list(self._staged):
            staged.release()

    def _verified(self, manifest: WeightManifest, data: memoryview) -> tuple[dict[str, torch.Tensor], str]:
        if data.nbytes < manifest.total_bytes:
            raise SyncError(f"the manifest claims {manifest.total_bytes} bytes, the object has {data.nbytes}")
        buffer = _tensor_over(data)
        tensors = views_of(buffer, manifest)
        if self._verification.mode == "off":
            if buffer.numel():
                int(buffer[:: mmap.PAGESIZE].max())  # every page is present before a decode step needs it
            return tensors, ""
        digest = self._verification.digest(manifest, tensors)
        self._verification.accept(manifest, digest, self._holder)
        return tensors, digest


class _Exporter:
    """Base of an array over bytes that must not be written. The array claims to be writable all the same, since torch
    takes no other without a warning; nothing here or in an engine writes to staged weights.
    """

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self.__array_interface__ = {
            "shape": raw.shape,
            "typestr": "|u1",
            "data": (raw.ctypes.data, False),
            "version": 3,
        }
        self._raw = raw


def _tensor_over(data: memoryview) -> torch.Tensor:
    """The bytes as a uint8 tensor; it, and every view of it, keeps them alive."""
    if data.nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Exporter(np.frombuffer(data, dtype=np.uint8))))


def _reference(manifest: WeightManifest) -> bytes:
    try:
        if manifest.arena_id.startswith(PREFIX):
            return bytes.fromhex(manifest.arena_id.removeprefix(PREFIX))
    except ValueError:
        pass
    raise SyncError(f"there is no arena {manifest.arena_id!r} in the object store")
