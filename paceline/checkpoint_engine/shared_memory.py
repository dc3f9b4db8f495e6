"""Checkpoint engine for one node: versions in sealed shared memory, mapped by every replica without a copy.

Sender: plan and allocate at the first capture, copy and digest into a free arena at each. Receiver: check the
manifest, take a lease, map (once per arena), touch every page, have the mapped bytes hashed once on this node
(`store.digest_ledger` says why that is enough). What a receiver stages costs no memory beyond the arena, and cannot
change while it is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

from paceline.checkpoint_engine.held_weights import HeldWeights
from paceline.checkpoint_engine.verification import Verification, VerifyMode
from paceline.core.errors import ConfigError
from paceline.core.manifest import WeightManifest
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_channel import LeaseConnection
from paceline.store.arena_reader import ArenaReader
from paceline.store.capacity import check_memory
from paceline.store.weight_store import WeightStore
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter


class SharedMemorySender:
    """Implements `core.ports.WeightSender`.

    `directory` holds the store's socket (in a directory of its own, mode 0700); `arenas` is the number of versions
    that can exist at a time; `dtype`, `keep`, `nonfinite` and `threads` are those of
    `weights.snapshot.SnapshotWriter`. `arena` is what versions lie in (`store.arena_backing`): "memfd", or "file" for
    nameless files in `directory`.
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
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._directory = directory
        self._arena_kind = arena
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value)
        self._store: WeightStore | None = None

    def capture(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        """Publish the tensors as they are now; they may change again once this returns.

        Raises:
            CoverageError, NonFiniteWeights, SyncError: see `SnapshotWriter` and `WeightStore.writing`.
            VersionError: not above the last version.
            CapacityError: at the first capture, when the arenas do not fit into memory.
        """
        plan, stored = self._writer.prepare(named_tensors)
        if self._store is None:
            needed = self._arenas * plan.total_bytes
            check_memory(needed, f"{self._arenas} weight arenas of {plan.total_bytes} bytes")
            self._store = WeightStore(
                directory=self._directory, arenas=self._arenas, capacity=plan.total_bytes, kind=self._arena_kind
            )
        with self._store.writing(version) as arena:
            return self._writer.publish(
                stored,
                torch.from_numpy(arena.array),
                version=version,
                arena_id=arena.arena_id,
                address=self._store.address,
            )

    def blocking_holders(self) -> Sequence[str]:
        return [] if self._store is None else self._store.blocking_holders()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class SharedMemoryReceiver:
    """Implements `core.ports.WeightReceiver`. `holder` names its leases; `verify` is that of `verification`."""

    def __init__(
        self, *, holder: str, verify: VerifyMode = "full", deadline_seconds: float = 60.0, threads: int = 1
    ) -> None:
        self._holder = holder
        self._verification = Verification(verify, holder=holder, threads=threads)
        self._deadline_seconds = deadline_seconds
        self._reader = ArenaReader()
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(self, manifest: WeightManifest) -> HeldWeights:
        """Lease, map, verify.

        Raises:
            SyncError: the manifest cannot be right, the store is gone, or it no longer has the version.
            DigestMismatch: the bytes are not those that were published.
            DeadlineExceeded: the store, or the receiver that verifies for this node, does not answer.
        """
        check_manifest(manifest, manifest.total_bytes)
        lease, connection = self._reader.lease(
            address=manifest.address,
            arena_id=manifest.arena_id,
            version=manifest.version,
            total_bytes=manifest.total_bytes,
            holder=self._holder,
            deadline_seconds=self._deadline_seconds,
        )
        try:
            tensors = views_of(torch.from_numpy(lease.array), manifest)
            digest, by = self._verified(manifest, tensors, connection)
        except BaseException:  # whatever ended the staging, its lease ends too
            lease.abandon()
            raise
        staged = HeldWeights(manifest, tensors, digest, lease.release, digest_by=by)
        self._staged.add(staged)
        return staged

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
        digest, by = connection.ask_digest(self._verification.scope, self._deadline_seconds)
        if not by:
            digest, by = self._verification.digest(manifest, tensors), self._holder
            connection.report_digest(digest)
        self._verification.accept(manifest, digest, by)
        return digest, by
