"""Checkpoint engine for one node: versions in sealed shared memory, mapped by every replica without a copy.

Sender: plan and allocate at the first capture, copy and digest into a free arena at each. Receiver: check the
manifest, take a lease, map, touch every page, digest the mapped bytes. What a receiver stages costs no memory beyond
the arena, and cannot change while it is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

from paceline.core.errors import ConfigError, DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.store.capacity import check_memory
from paceline.store.mapped_arena import MappedArena, lease_arena
from paceline.store.weight_store import WeightStore
from paceline.weights.digest import digest_tensors
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter


class SharedMemorySender:
    """Implements `core.ports.WeightSender`.

    `directory` holds the store's socket (in a directory of its own, mode 0700); `arenas` is the number of versions
    that can exist at a time; `dtype`, `keep`, `nonfinite` and `threads` are those of
    `weights.snapshot.SnapshotWriter`.
    """

    def __init__(
        self,
        *,
        directory: str,
        arenas: int,
        dtype: str | None,
        nonfinite: Literal["error", "off"],
        threads: int,
        keep: tuple[str, ...] = (),
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._directory = directory
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads)
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
            self._store = WeightStore(directory=self._directory, arenas=self._arenas, capacity=plan.total_bytes)
        with self._store.writing(version) as arena:
            digest = self._writer.write(stored, torch.from_numpy(arena.array))
        return WeightManifest(
            version=version,
            base_version=None,
            tensors=plan.tensors,
            aliases=plan.aliases,
            total_bytes=plan.total_bytes,
            digest=digest,
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
    """Implements `core.ports.WeightReceiver`. `holder` names its leases; `verify="full"` digests what is staged."""

    def __init__(self, *, holder: str, verify: Literal["full", "off"], deadline_seconds: float) -> None:
        self._holder = holder
        self._verify = verify
        self._deadline_seconds = deadline_seconds
        self._staged: weakref.WeakSet[_MappedWeights] = weakref.WeakSet()

    def stage(self, manifest: WeightManifest) -> _MappedWeights:
        """Lease, map, verify.

        Raises:
            SyncError: the manifest cannot be right, the store is gone, or it no longer has the version.
            DigestMismatch: the bytes are not those that were published.
            DeadlineExceeded: the store does not answer.
        """
        check_manifest(manifest, manifest.total_bytes)
        mapped = lease_arena(
            address=manifest.address,
            arena_id=manifest.arena_id,
            version=manifest.version,
            total_bytes=manifest.total_bytes,
            holder=self._holder,
            deadline_seconds=self._deadline_seconds,
        )
        try:
            tensors = views_of(torch.from_numpy(mapped.array), manifest)
            digest = digest_tensors(tensors, manifest.aliases) if self._verify == "full" else ""
            if self._verify == "full" and digest != manifest.digest:
                raise DigestMismatch(
                    f"version {manifest.version} was published as {manifest.digest}, {self._holder} staged {digest}"
                )
        except BaseException:  # whatever ended the staging, its lease ends too
            mapped.abandon()
            raise
        staged = _MappedWeights(manifest, tensors, digest, mapped)
        self._staged.add(staged)
        return staged

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in list(self._staged):
            staged.release()


class _MappedWeights:
    """Implements `core.ports.StagedWeights` over a leased map."""

    def __init__(
        self, manifest: WeightManifest, tensors: dict[str, torch.Tensor], digest: str, mapped: MappedArena
    ) -> None:
        self._manifest = manifest
        self._tensors = tensors
        self._digest = digest
        self._mapped: MappedArena | None = mapped

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._mapped is None:
            raise SyncError(f"version {self._manifest.version} was released")
        return self._tensors

    @property
    def digest(self) -> str:
        return self._digest

    def release(self) -> None:
        """Idempotent. The lease ends once no tensor of this version is referenced any more (see `MappedArena`)."""
        if self._mapped is not None:
            # Emptied in place: a caller that kept the mapping must not keep the lease.
            self._tensors.clear()
            mapped, self._mapped = self._mapped, None
            mapped.release()
