"""Checkpoint engine for one node: versions in sealed shared memory, mapped by every replica without a copy.

Sender: plan and allocate at the first capture, copy and digest into a free arena at each; the arena is of no version
until `publish`. Receiver: check the
manifest, take a lease, map (once per arena), touch every page, have the mapped bytes hashed once on this node
(`store.digest_ledger` says why that is enough). What a receiver stages costs no memory beyond the arena, and cannot
change while it is held.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.delta_sending import DeltaEncoder, DeltaMode
from paceline.checkpoint_engine.delta_staging import fitting_delta, prepare_change, read_announced
from paceline.checkpoint_engine.held_weights import HeldWeights, Taken
from paceline.checkpoint_engine.snapshots import Snapshot
from paceline.checkpoint_engine.verification import Verification, VerifyMode, claim_of
from paceline.core.errors import ConfigError, DeadlineExceeded, SyncError
from paceline.core.manifest import Captured, Published, WeightManifest
from paceline.core.weight_ports import StagedWeights
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_channel import LeaseConnection
from paceline.store.arena_reader import ArenaReader
from paceline.store.capacity import check_memory
from paceline.store.copy_progress import CopyBoard, VersionCopies
from paceline.store.weight_store import WeightStore
from paceline.weights.layout import ALIGNMENT, ManifestCheck, views_of
from paceline.weights.snapshot import SnapshotWriter

# Of a receiver's deadline, how much it waits for another one's digest.
_PATIENCE = 0.5
_log = logging.getLogger(__name__)


DELTA_PART = 8
LEAST_DELTA_ROOM = 1 << 16


class SharedMemorySender:
    """Implements `core.ports.WeightSender`.

    `directory` holds the store's socket (in a directory of its own, mode 0700); `arenas` is the number of versions
    that can exist at a time; `dtype`, `keep`, `nonfinite` and `threads` are those of
    `weights.snapshot.SnapshotWriter`. `arena` is what versions lie in (`store.arena_backing`): "memfd", or "file" for
    nameless files in `directory`.

    The full version always lies in its arena. With `delta="delta"` the delta lies behind it, for replicas whose engines
    own their memory: each arena is `1 / DELTA_PART` larger, and a delta that does not fit there is not sent. `auto` is
    full here: what is mapped costs nothing to fetch.
    """

    def __init__(
        self,
        *,
        directory: str,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "skip", "off"] = "error",
        threads: int = 1,
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
        arena: ArenaKind = "memfd",
        delta: DeltaMode = "full",
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._directory = directory
        self._arena_kind = arena
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value)
        self._store: WeightStore | None = None
        self._writing = ExitStack()
        self._captured: Snapshot | None = None
        self._base_version: int | None = None
        self._published: dict[str, WeightManifest] = {}  # by arena
        self._encoder = DeltaEncoder("delta" if delta == "delta" else "full", level="fast", threads=threads)

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """Copy the tensors as they are now; they may change again once this returns.

        Raises:
            CoverageError, NonFiniteWeights, SyncError: see `SnapshotWriter` and `WeightStore.writing`.
            VersionError: not above the last version.
            CapacityError: at the first capture, when the arenas do not fit into memory.
        """
        self._abandon()
        plan, stored = self._writer.prepare(named_tensors)
        if self._store is None:
            capacity = plan.total_bytes
            if self._encoder.mode == "delta":
                capacity = _delta_offset(plan.total_bytes) + max(LEAST_DELTA_ROOM, plan.total_bytes // DELTA_PART)
            check_memory(self._arenas * capacity, f"{self._arenas} weight arenas of {capacity} bytes")
            self._store = WeightStore(
                directory=self._directory, arenas=self._arenas, capacity=capacity, kind=self._arena_kind
            )
        with ExitStack() as writing:
            arena = writing.enter_context(self._store.writing(version))
            self._published.pop(arena.arena_id, None)
            buffer = torch.from_numpy(arena.array)
            manifest = self._writer.publish(
                stored, buffer, version=version, arena_id=arena.arena_id, address=self._store.address
            )
            self._writing = writing.pop_all()
        self._captured = Snapshot(manifest, buffer)
        self._base_version = base_version
        return self._captured.captured

    def publish(self) -> Published:
        """Let readers ask for what was captured.

        Raises:
            SyncError: nothing was captured.
        """
        snapshot = self._captured
        if snapshot is None:
            raise SyncError("there is no captured version to publish")
        attempt = self._encoder.encode(self._base(), snapshot)
        offset = _delta_offset(snapshot.manifest.total_bytes)
        record = attempt.record(snapshot.manifest.arena_id, offset)
        if attempt.delta is not None and record is not None:
            if record.nbytes <= snapshot.buffer.numel() - offset:
                snapshot.buffer.numpy()[offset : offset + record.nbytes] = np.frombuffer(attempt.delta.data, np.uint8)
            else:
                record = None
        manifest = replace(snapshot.manifest, delta=record)
        self._captured = None
        self._writing.close()
        self._published[manifest.arena_id] = manifest
        return Published(manifest, attempt.seconds, attempt.changed_share)

    def blocking_holders(self) -> Sequence[str]:
        if self._store is None or self._captured is not None:  # the next capture takes that arena again
            return []
        return self._store.blocking_holders()

    def close(self) -> None:
        self._abandon()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _base(self) -> Snapshot | None:
        """The base, if its arena has not been written since."""
        if self._store is None:
            return None
        for manifest in self._published.values():
            if manifest.version == self._base_version:
                array = self._store.payload(manifest.arena_id)
                return None if array is None else Snapshot(manifest, torch.from_numpy(array))
        return None

    def _abandon(self) -> None:
        """What was captured and not published is of no version, and its arena is free."""
        snapshot, self._captured = self._captured, None
        if snapshot is not None:
            with suppress(_Abandoned), self._writing:
                raise _Abandoned


def _delta_offset(total_bytes: int) -> int:
    return -(-total_bytes // ALIGNMENT) * ALIGNMENT


class _Abandoned(Exception):
    """Ends the writing of an arena without a version."""


class SharedMemoryReceiver:
    """Implements `core.ports.WeightReceiver`. `holder` names its leases; `verify` is that of `verification`."""

    def __init__(
        self, *, holder: str, verify: VerifyMode = "full", deadline_seconds: float = 60.0, threads: int = 1
    ) -> None:
        self._holder = holder
        self._verification = Verification(verify, holder=holder, threads=threads)
        self._deadline_seconds = deadline_seconds
        self._threads = threads
        self._reader = ArenaReader()
        self._check = ManifestCheck()
        self._board: CopyBoard | None = None
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> HeldWeights:
        """Lease, map, verify; for an engine that copies also decode the delta, if it is against `base`.

        Raises:
            SyncError: the manifest cannot be right, the store is gone, or it no longer has the version.
            DigestMismatch: the bytes are not those that were published.
            DeadlineExceeded: the store does not answer.
        """
        self._check(manifest, manifest.total_bytes)
        record = fitting_delta(manifest, base) if apply == "copied" else None
        lease, connection = self._reader.lease(
            address=manifest.address,
            arena_id=manifest.arena_id,
            version=manifest.version,
            total_bytes=manifest.total_bytes if record is None else record.offset + record.nbytes,
            holder=self._holder,
            deadline_seconds=self._deadline_seconds,
        )
        try:
            tensors = views_of(torch.from_numpy(lease.array), manifest)
            digest, by = self._verified(manifest, tensors, connection)
            change, taken = None, None
            if record is not None and base is not None:
                data = lease.array[record.offset : record.offset + record.nbytes].data
                change = prepare_change(read_announced(data, record, manifest), base, self._threads)
                taken = Taken(record.base_version, record.nbytes)
        except BaseException:  # whatever ended the staging, its lease ends too
            lease.abandon()
            raise
        copies = self._copies_of(manifest) if apply == "copied" else None
        staged = HeldWeights(
            manifest, tensors, digest, lease.release, digest_by=by, taken=taken, change=change, copies=copies
        )
        self._staged.add(staged)
        return staged

    def _copies_of(self, manifest: WeightManifest) -> VersionCopies:
        home = Path(manifest.address).parent
        if self._board is None or self._board.home != home:
            self._board = CopyBoard(home)
        return self._board.of(manifest.version)

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in list(self._staged):
            staged.release()
        self._reader.close()

    def _verified(
        self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor], connection: LeaseConnection
    ) -> tuple[str, str]:
        """The digest of the leased bytes and who of this node has taken it; empty when verification is off."""
        if self._verification.mode == "off":
            return "", ""
        try:
            patience = _PATIENCE * self._deadline_seconds
            digest, by = connection.ask_digest(self._verification.scope, claim_of(manifest), patience)
        except DeadlineExceeded as error:
            # One that hangs while it hashes must not take the others' sync with it.
            _log.warning("verify.not_waited_for: %s; %s hashes for itself", error.message, self._holder)
            digest, by = "", ""
        if not by:
            digest, by = self._verification.digest(manifest, tensors), self._holder
            connection.report_digest(digest)
        self._verification.accept(manifest, digest, by)
        return digest, by
