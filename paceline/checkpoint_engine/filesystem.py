"""Checkpoint engine over files: a version is a directory of safetensors shards, at any URL that fsspec knows.

The marker is written last, so a crash or a full disk anywhere leaves the last whole version readable. The trainer is
free once its tensors are copied into memory of its process; files are written from there. A receiver copies a version
into memory of its own and proves it there. Readers elsewhere follow the same root (`filesystem_follower`). With deltas
a version is full every `full_every` versions and a delta in between; a reader that does not serve its base follows the
chain (`filesystem_chain`). What stays at the root: `filesystem_retention`. Object stores have no locks: a reader slower
than that finds the marker gone ("version is gone").
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Literal

import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.delta_sending import DeltaEncoder, DeltaMode
from paceline.checkpoint_engine.delta_staging import PreparedChange, prepare_change
from paceline.checkpoint_engine.filesystem_chain import open_chain, read_chain
from paceline.checkpoint_engine.filesystem_format import plan_shards, shard_of
from paceline.checkpoint_engine.filesystem_opening import open_storage
from paceline.checkpoint_engine.filesystem_retention import Retention
from paceline.checkpoint_engine.filesystem_writing import VersionWriter
from paceline.checkpoint_engine.held_weights import HeldWeights, Taken
from paceline.checkpoint_engine.private_memory import Buffers
from paceline.checkpoint_engine.snapshots import Snapshot, SnapshotMemory
from paceline.core.errors import CapacityError, ConfigError, DeadlineExceeded, DigestMismatch, SyncError, VersionError
from paceline.core.manifest import Captured, Published, WeightManifest
from paceline.core.ports import Clock
from paceline.core.version import Version
from paceline.core.weight_ports import StagedWeights
from paceline.weights.layout import ManifestCheck, views_of
from paceline.weights.snapshot import SnapshotWriter
from paceline.weights.tree_digest import root_digest

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilesystemSender:
    """Implements `core.ports.WeightSender`. Not for two threads at a time.

    `url` is a root that is empty, absent, or has held versions before; older versions in it stay until retention takes
    them, unfinished ones are cleared now. `keep_versions` (at least 2) and `keep_seconds` are the retention,
    `shard_bytes` the data per file; `delta` is that of `delta_sending`. `dtype`, `keep`, `nonfinite` and `threads` are
    those of `weights.snapshot.SnapshotWriter`.
    """

    def __init__(
        self,
        *,
        url: str,
        clock: Clock,
        keep_versions: int = 4,
        keep_seconds: float = 30.0,
        shard_bytes: int = 256 << 20,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        threads: int = 1,
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
        delta: DeltaMode = "full",
        full_every: int = 8,
    ) -> None:
        if keep_versions < 2:
            raise ConfigError(
                f"weights need at least 2 kept versions (the newest and the one before), not {keep_versions}"
            )
        if shard_bytes < 1:
            raise ConfigError(f"a shard of {shard_bytes} bytes holds nothing")
        self._keep_versions = keep_versions
        self._shard_bytes = shard_bytes
        self._clock = clock
        self._snapshots = SnapshotMemory(
            SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value)
        )
        self._captured: Snapshot | None = None
        self._base_version: int | None = None
        self._encoder = DeltaEncoder(delta, level="small", threads=threads)
        self._full_every = full_every
        self._since_full = 0
        self._room_was_checked = False
        self._storage = open_storage(url)
        self._retention = Retention(self._storage, keep_versions=keep_versions, keep_seconds=keep_seconds)
        self._writer = VersionWriter(self._storage)
        self._storage.prepare_writing()
        self._clear_unfinished()
        for version in self._storage.versions():
            self._retention.found(version, clock.now())

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """Copy the tensors as they are now into memory of this process.

        Raises:
            CoverageError, NonFiniteWeights: see `SnapshotWriter`.
            VersionError: not above the newest version at the root.
            CapacityError: no memory, or, at the first capture, when the versions to keep do not fit.
            SyncError: the storage has no room for one more version.
        """
        self._captured = None
        plan, stored = self._snapshots.prepare(named_tensors)
        name = Version.unpack(version)
        newest = self._retention.newest
        if newest is not None and name <= newest:
            raise VersionError(f"version {name} cannot follow version {newest} at {self._storage.url}")
        shards = plan_shards(plan.tensors, self._shard_bytes)
        self._check_room(sum(shard_of(shard).nbytes for shard in shards))
        self._base_version = None if self._encoder.mode == "full" else base_version
        self._captured = self._snapshots.capture(plan, stored, version, self._base_version)
        return self._captured.captured

    def publish(self) -> Published:
        """Write what was captured: once this returns, the version is whole and survives a crash.

        Raises:
            SyncError: nothing was captured, or the storage failed or is full; the versions before are as they were.
        """
        snapshot, self._captured = self._captured, None
        if snapshot is None:
            raise SyncError("there is no captured version to publish")
        name = Version.unpack(snapshot.manifest.version)
        try:
            attempt = self._encoder.encode(self._base(), snapshot)
            is_full = attempt.delta is None or self._since_full + 1 >= self._full_every
            shards = plan_shards(snapshot.manifest.tensors, self._shard_bytes) if is_full else []
            manifest = self._writer.write(name, snapshot, shards, attempt)
        except OSError as error:
            self._abandon(name)
            raise self._storage_error(name, snapshot.manifest.total_bytes, error) from error
        except BaseException:  # whatever ended the publication, its files go
            self._abandon(name)
            raise
        self._since_full = 0 if is_full else self._since_full + 1
        base = None if is_full or manifest.delta is None else Version.unpack(manifest.delta.base_version)
        self._retention.add(name, self._clock.now(), base)
        self._retention.prune(self._clock.now())
        return Published(manifest, attempt.seconds, attempt.changed_share)

    def blocking_holders(self) -> Sequence[str]:
        """Nobody: readers copy, and what they read is not written again."""
        return []

    def close(self) -> None:
        """Let other writers in; the versions stay."""
        self._captured = None
        self._snapshots.close()
        self._storage.close()

    def _base(self) -> Snapshot | None:
        """The base, if it can still be read by those who do not serve it."""
        snapshot = self._snapshots.find(self._base_version)
        at_root = snapshot is not None and Version.unpack(snapshot.manifest.version) in self._retention
        return snapshot if at_root else None

    def _check_room(self, nbytes: int) -> None:
        free = self._storage.free_bytes()
        first = not self._room_was_checked
        # A version is removed only after the next one is whole.
        versions = max(1, self._keep_versions + 1 - len(self._retention)) if first else 1
        if free is None or versions * nbytes <= free:
            self._room_was_checked = True
            return
        kind = CapacityError if first else SyncError
        raise kind(
            f"{versions} versions of {nbytes} bytes at {self._storage.url} need {versions * nbytes} bytes, "
            f"but {free} bytes are free{self._held_text()}"
        )

    def _storage_error(self, name: Version, nbytes: int, error: OSError) -> SyncError:
        if error.errno in _NO_ROOM:
            free = self._storage.free_bytes()
            known = "an unknown number of" if free is None else str(free)
            return SyncError(
                f"version {name} was not published: {self._storage.url} is full ({nbytes} bytes needed, "
                f"{known} bytes free){self._held_text()}"
            )
        return SyncError(f"version {name} was not published: writing to {self._storage.url} failed: {error}")

    def _held_text(self) -> str:
        names = ", ".join(map(str, self._retention.held))
        return f"; readers keep {names} from removal" if names else ""

    def _abandon(self, name: Version) -> None:
        # The first error is the one to tell; what stays is cleared at the next start.
        with suppress(OSError, SyncError):
            self._storage.remove(name)

    def _clear_unfinished(self) -> None:
        try:
            for version in self._storage.versions():
                if not self._storage.is_complete(version):
                    logger.info("filesystem.cleared %s %s", self._storage.url, version)
                    self._storage.remove(version)
        except (OSError, SyncError) as error:
            self._storage.close()
            raise ConfigError(f"cannot clear an unfinished version at {self._storage.url}: {error}") from error


def _described(manifest: WeightManifest) -> WeightManifest:
    """Without where it lies and how it can be reached."""
    return replace(manifest, address="", delta=None)


class FilesystemReceiver:
    """Implements `core.ports.WeightReceiver`: reads `url`, whatever address a manifest has.

    `holder` names this replica in errors. Staged weights are memory of this process: they need nothing of the file
    system any more. The memory of one released version is kept for the next one, until `close`.
    """

    def __init__(
        self,
        *,
        url: str,
        holder: str,
        clock: Clock,
        verify: Literal["full", "off"] = "full",
        deadline_seconds: float = 60.0,
        threads: int = 1,
    ) -> None:
        self._holder = holder
        self._verify = verify
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._threads = threads
        self._buffers = Buffers()
        self._storage = open_storage(url)
        self._check = ManifestCheck()
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> HeldWeights:
        """Read and verify; where that is fewer bytes, by deltas from `base` on.

        Raises:
            SyncError: the manifest or a file cannot be right, or the version is gone.
            DigestMismatch: the files are not what was published.
            CapacityError: no memory for the copy. DeadlineExceeded: the storage is too slow.
        """
        self._check(manifest, manifest.total_bytes)
        name = Version.unpack(manifest.version)
        where = f"{self._storage.url}/{name}"
        if manifest.arena_id != str(name):
            raise SyncError(f"there is no arena {manifest.arena_id!r}: version {name} lies at {where}")
        try:
            staged = self._read(manifest, name, where, base, apply)
        except FileNotFoundError as error:
            raise SyncError(f"version {manifest.version} is gone: {where} is not there or not whole") from error
        except OSError as error:
            raise SyncError(f"{where} cannot be read: {error}") from error
        self._staged.add(staged)
        return staged

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in list(self._staged):
            staged.release()
        self._buffers.close()
        self._storage.close()

    def _read(
        self,
        manifest: WeightManifest,
        name: Version,
        where: str,
        base: StagedWeights | None,
        apply: Literal["mapped", "copied"],
    ) -> HeldWeights:
        began = self._clock.now()

        def check_time() -> None:
            if self._clock.now() - began > self._deadline_seconds:
                message = f"{self._holder} read {where} for {self._deadline_seconds:g} s without reaching its end"
                raise DeadlineExceeded(message, self._storage.url, self._deadline_seconds)

        with ExitStack() as held:
            # Who announces no delta wants none used: a fenced replica comes back by a full version.
            base = None if manifest.delta is None else base
            chain = open_chain(self._storage, name, None if base is None else base.manifest, held)
            last = chain.deltas[-1][0] if chain.deltas else chain.full
            if last is None or _described(last.stored.weights) != _described(manifest):
                raise DigestMismatch(f"{where} is not the version {manifest.version} that was announced")
            buffer = self._buffers.take(manifest.total_bytes, f"a copy of version {name}")
            digests = read_chain(chain, base, buffer, check_time, self._threads)
            change: PreparedChange | None = None
            if apply == "copied" and base is not None and chain.full is None and len(chain.deltas) == 1:
                change = prepare_change(last.read_delta(chain.deltas[0][1]), base, self._threads)
        digest = self._proved(manifest, digests) if self._verify == "full" else ""
        taken = None if chain.full is not None or base is None else Taken(base.manifest.version, chain.nbytes)
        return HeldWeights(manifest, views_of(buffer, manifest), digest, taken=taken, change=change)

    def _proved(self, weights: WeightManifest, digests: Mapping[str, bytes]) -> str:
        entries = {meta.name: (meta.dtype, meta.shape, digests[meta.name]) for meta in weights.tensors}
        digest = root_digest(entries, weights.aliases)
        if digest != weights.digest:
            wrong = [repr(meta.name) for meta in weights.tensors if digests[meta.name].hex() != meta.digest]
            raise DigestMismatch(
                f"version {weights.version} was published as {weights.digest}, {self._holder} staged {digest}: "
                f"{len(wrong)} tensors differ, first {wrong[0]}"
            )
        return digest
