"""Checkpoint engine between nodes: a version is one immutable object, which crosses to a node once.

Sender: copy and digest into a buffer of its own, laid out as every arena; to publish is to put it into the object store
under the `ObjectTransport` port (Ray's, in a run). Receiver: get the object as bytes of its own node's store, without a
copy, see the tensors in it, verify, hold it. Law of memory: the newest version and those that are still held are at
most `arenas` less one when the next is put, so the store never holds more than `arenas`. An object is not written
again, so what is held cannot change; its lease is the reference that comes with its bytes, which ends with the last
tensor over them or with the process.

A delta is an object beside the full one: a receiver that serves the base gets that alone and builds the version in
memory of its own; all others get the full object. Nothing crosses that nobody gets.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from paceline.checkpoint_engine.delta_sending import DeltaEncoder, DeltaMode
from paceline.checkpoint_engine.delta_staging import build, fitting_delta, prepare_change, read_announced
from paceline.checkpoint_engine.held_weights import HeldWeights, Taken
from paceline.checkpoint_engine.private_memory import Buffers
from paceline.checkpoint_engine.snapshots import Snapshot, SnapshotMemory
from paceline.checkpoint_engine.verification import Verification, claim_of
from paceline.core.errors import ConfigError, PacelineError, SyncError, VersionError
from paceline.core.manifest import Captured, DeltaRecord, Published, WeightManifest
from paceline.core.object_transport import ObjectTransport
from paceline.core.weight_ports import StagedWeights
from paceline.store.node_digests import NodeDigests
from paceline.weights.layout import ManifestCheck, views_of
from paceline.weights.snapshot import SnapshotWriter

ADDRESS = "ray_object"
PREFIX = "object-"
# Of a receiver's deadline, how much it waits for another one's digest.
_PATIENCE = 0.5


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
        delta: DeltaMode = "full",
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._objects = objects
        self._arenas = arenas
        self._snapshots = SnapshotMemory(
            SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value)
        )
        self._captured: Snapshot | None = None
        self._room_was_checked = False
        self._newest: tuple[int, bytes] | None = None
        self._newest_delta: bytes | None = None
        self._base_version: int | None = None
        self._encoder = DeltaEncoder(delta, level="small", threads=threads)
        self._retired: list[bytes] = []

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """Copy the tensors as they are now; they may change again once this returns.

        Raises:
            CoverageError, NonFiniteWeights: see `SnapshotWriter`.
            VersionError: not above the last version.
            SyncError: so many versions are held that the store has no room.
            CapacityError: at the first capture, when the store cannot hold `arenas` versions.
        """
        self._captured = None
        plan, stored = self._snapshots.prepare(named_tensors)
        if self._newest is not None and version <= self._newest[0]:
            raise VersionError(f"version {version} cannot follow version {self._newest[0]}")
        if holders := self.blocking_holders():
            raise SyncError(f"no free arena for version {version}: held by {', '.join(holders)}")
        if not self._room_was_checked:
            self._objects.check_room(self._arenas * plan.total_bytes)
            self._room_was_checked = True
        self._base_version = None if self._encoder.mode == "full" else base_version
        self._captured = self._snapshots.capture(plan, stored, version, self._base_version)
        return self._captured.captured

    def publish(self) -> Published:
        """Put what was captured into the object store.

        Raises:
            SyncError: nothing was captured, or the store takes no object.
        """
        snapshot, self._captured = self._captured, None
        if snapshot is None:
            raise SyncError("there is no captured version to publish")
        attempt = self._encoder.encode(self._snapshots.find(self._base_version), snapshot)
        reference = self._objects.put(snapshot.buffer.numpy().data)
        delta_reference: bytes | None = None
        if attempt.delta is not None:
            with suppress(SyncError):  # no room: the full version is there
                delta_reference = self._objects.put(memoryview(attempt.delta.data))
        self._retire_newest()
        self._newest, self._newest_delta = (snapshot.manifest.version, reference), delta_reference
        record = None if delta_reference is None else attempt.record(PREFIX + delta_reference.hex())
        manifest = replace(snapshot.manifest, arena_id=PREFIX + reference.hex(), address=ADDRESS, delta=record)
        return Published(manifest, attempt.seconds, attempt.changed_share)

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
        self._captured = None
        self._snapshots.close()

    def _retire_newest(self) -> None:
        if self._newest is not None:
            _, reference = self._newest
            self._newest = None
            self._retired.append(reference)
            self._objects.release(reference)
        if self._newest_delta is not None:  # small, and needed for a moment only: not counted
            self._objects.release(self._newest_delta)
            self._newest_delta = None


class RayObjectReceiver:
    """Implements `core.ports.WeightReceiver`. `holder` names it for the owner.

    `verify` is that of `verification`; each version comes to a node anew, so none of its bytes are taken on trust
    ("changed"). With `digests` one receiver of a node hashes an object for all that are handed the same.
    """

    def __init__(
        self,
        objects: ObjectTransport,
        *,
        holder: str,
        verify: Literal["full", "off"],
        deadline_seconds: float,
        threads: int = 1,
        digests: NodeDigests | None = None,
    ) -> None:
        self._objects = objects
        self._holder = holder
        self._verification = Verification(verify, holder=holder, threads=threads)
        self._deadline_seconds = deadline_seconds
        self._threads = threads
        self._digests = digests
        self._buffers = Buffers()
        self._check = ManifestCheck()
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> HeldWeights:
        """Get, verify, hold; where there is a delta against `base`, get that and build the version here.

        Raises:
            SyncError: the manifest cannot be right, the version is gone, or its object is lost.
            DigestMismatch: the bytes are not those that were published.
            WorkerDied: the owner of the object is gone. DeadlineExceeded: the object did not come.
        """
        self._check(manifest, manifest.total_bytes)
        record = fitting_delta(manifest, base)
        if record is not None and base is not None:
            staged = self._build(manifest, record, base, apply)
        else:
            staged = self._hold(manifest)
        self._staged.add(staged)
        return staged

    def _build(
        self, manifest: WeightManifest, record: DeltaRecord, base: StagedWeights, apply: Literal["mapped", "copied"]
    ) -> HeldWeights:
        reference = _reference(manifest, record.arena_id)
        data = self._get(manifest, reference)
        try:
            if data.nbytes != record.nbytes:
                raise SyncError(f"the delta of version {manifest.version} has {data.nbytes} bytes, not {record.nbytes}")
            delta = read_announced(data, record, manifest)
            tensors = build(delta, base, manifest, self._buffers, self._threads)
            change = prepare_change(delta, base, self._threads) if apply == "copied" else None
        finally:
            self._objects.done(reference, holder=self._holder)
        digest = ""
        if self._verification.mode != "off":
            digest = self._verification.digest(manifest, tensors)
            self._verification.accept(manifest, digest, self._holder)
        return HeldWeights(manifest, tensors, digest, taken=Taken(record.base_version, record.nbytes), change=change)

    def _get(self, manifest: WeightManifest, reference: bytes) -> memoryview:
        try:
            return self._objects.get(reference, holder=self._holder, deadline_seconds=self._deadline_seconds)
        except LookupError as error:
            raise SyncError(f"version {manifest.version} is gone: {error}") from error

    def _hold(self, manifest: WeightManifest) -> HeldWeights:
        reference = _reference(manifest, manifest.arena_id)
        data = self._get(manifest, reference)
        try:
            tensors, digest, by = self._verified(manifest, data)
        except BaseException as error:  # whatever ended the staging, its lease ends too
            del data
            if isinstance(error, PacelineError):
                error.__traceback__ = None  # the frames of a refusal refer to the bytes
            self._objects.done(reference, holder=self._holder)
            raise
        objects, holder = self._objects, self._holder
        return HeldWeights(manifest, tensors, digest, lambda: objects.done(reference, holder=holder), by)

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in list(self._staged):
            staged.release()
        self._buffers.close()

    def _verified(self, manifest: WeightManifest, data: memoryview) -> tuple[dict[str, torch.Tensor], str, str]:
        """The tensors, their digest and who of this node has taken it; no digest when verification is off."""
        if data.nbytes < manifest.total_bytes:
            raise SyncError(f"the manifest claims {manifest.total_bytes} bytes, the object has {data.nbytes}")
        buffer = _tensor_over(data)
        tensors = views_of(buffer, manifest)
        digest, by = self._digest(manifest, tensors)
        if by != self._holder and buffer.numel():
            int(buffer[:: mmap.PAGESIZE].max())  # every page is present before a decode step needs it
        if by:
            self._verification.accept(manifest, digest, by)
        return tensors, digest, by

    def _digest(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        if self._verification.mode == "off":
            return "", ""

        def take() -> str:
            return self._verification.digest(manifest, tensors)

        if self._digests is None:
            return take(), self._holder
        patience = _PATIENCE * self._deadline_seconds
        key = f"{manifest.arena_id}-{claim_of(manifest)}"
        return self._digests.once(self._objects.node, key, self._holder, take, patience)


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


def _reference(manifest: WeightManifest, arena_id: str) -> bytes:
    try:
        if arena_id.startswith(PREFIX):
            return bytes.fromhex(arena_id.removeprefix(PREFIX))
    except ValueError:
        pass
    raise SyncError(f"there is no arena {arena_id!r} of version {manifest.version} in the object store")
