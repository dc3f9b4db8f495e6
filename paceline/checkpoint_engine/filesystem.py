"""Checkpoint engine over files: a version is a directory of safetensors shards, at any URL that fsspec knows.

The marker is written last, so a crash or a full disk anywhere leaves the last whole version readable. A receiver copies
a version into memory of its own and proves it there. Readers elsewhere follow the same root
(`filesystem_follower`).

Retention: the newest `keep_versions` and all younger than `keep_seconds` stay, and on a local file system every version
that is being read. Object stores have no locks: a reader slower than both finds the marker gone ("version is gone").
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import torch

from paceline.checkpoint_engine.filesystem_format import StoredManifest, announced, plan_shards, shard_of
from paceline.checkpoint_engine.filesystem_opening import open_storage
from paceline.checkpoint_engine.filesystem_reading import Buffers, check_files, read_stored, read_tensors
from paceline.checkpoint_engine.filesystem_writing import VersionWriter
from paceline.checkpoint_engine.held_weights import HeldWeights
from paceline.core.errors import CapacityError, ConfigError, DeadlineExceeded, DigestMismatch, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.version import Version
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter
from paceline.weights.tree_digest import root_digest

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilesystemSender:
    """Implements `core.ports.WeightSender`. Not for two threads at a time.

    `url` is a root that is empty, absent, or has held versions before; older versions in it stay until retention takes
    them, unfinished ones are cleared now. `keep_versions` (at least 2) and `keep_seconds` are the retention,
    `shard_bytes` the data per file; staging memory is two shards, or twice the largest tensor. `dtype`, `keep`,
    `nonfinite` and `threads` are those of `weights.snapshot.SnapshotWriter`.
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
    ) -> None:
        if keep_versions < 2:
            raise ConfigError(
                f"weights need at least 2 kept versions (the newest and the one before), not {keep_versions}"
            )
        if shard_bytes < 1:
            raise ConfigError(f"a shard of {shard_bytes} bytes holds nothing")
        self._keep_versions = keep_versions
        self._keep_seconds = keep_seconds
        self._shard_bytes = shard_bytes
        self._clock = clock
        self._planner = SnapshotWriter(
            dtype=dtype, keep=keep, nonfinite=nonfinite, threads=threads, any_value=any_value
        )
        self._room_was_checked = False
        self._held: list[Version] = []
        self._storage = open_storage(url)
        self._writer = VersionWriter(self._storage, nonfinite=nonfinite, any_value=any_value, threads=threads)
        self._storage.prepare_writing()
        self._clear_unfinished()
        self._published = {version: clock.now() for version in self._storage.versions()}

    def capture(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        """Publish the tensors as they are now: once this returns, the version is whole and survives a crash.

        Raises:
            CoverageError, NonFiniteWeights: see `SnapshotWriter`; nothing was published.
            VersionError: not above the newest version at the root.
            CapacityError: at the first capture, when the versions to keep do not fit.
            SyncError: the storage failed or is full; the versions before are as they were.
        """
        plan, stored = self._planner.prepare(named_tensors)
        name = Version.unpack(version)
        newest = max(self._published, default=None)
        if newest is not None and name <= newest:
            raise VersionError(f"version {name} cannot follow version {newest} at {self._storage.url}")
        shards = plan_shards(plan.tensors, self._shard_bytes)
        self._check_room(sum(shard_of(shard).nbytes for shard in shards))
        try:
            manifest = self._writer.write(name, plan, shards, stored)
        except OSError as error:
            self._abandon(name)
            raise self._storage_error(name, plan.total_bytes, error) from error
        except BaseException:  # whatever ended the capture, its files go
            self._abandon(name)
            raise
        self._published[name] = self._clock.now()
        self._prune()
        return manifest

    def blocking_holders(self) -> Sequence[str]:
        """Nobody: readers copy, and what they read is not written again."""
        return []

    def close(self) -> None:
        """Let other writers in; the versions stay."""
        self._storage.close()

    def _check_room(self, nbytes: int) -> None:
        free = self._storage.free_bytes()
        first = not self._room_was_checked
        # A version is removed only after the next one is whole.
        versions = max(1, self._keep_versions + 1 - len(self._published)) if first else 1
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
        names = ", ".join(map(str, self._held))
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

    def _prune(self) -> None:
        now = self._clock.now()
        old = sorted(self._published)[: -self._keep_versions]
        self._held = []
        for version in old:
            if now - self._published[version] < self._keep_seconds:
                continue
            try:
                if not self._storage.remove(version):
                    self._held.append(version)
                    continue
            except FileNotFoundError:
                logger.warning("filesystem.prune_missing %s %s", self._storage.url, version)
            except (OSError, SyncError) as error:  # the new version is published; a later prune tries again
                logger.warning("filesystem.prune_failed %s %s: %s", self._storage.url, version, error)
                continue
            del self._published[version]


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
        self._staged: weakref.WeakSet[HeldWeights] = weakref.WeakSet()

    def stage(self, manifest: WeightManifest) -> HeldWeights:
        """Read and verify.

        Raises:
            SyncError: the manifest or a file cannot be right, or the version is gone.
            DigestMismatch: the files are not what was published.
            CapacityError: no memory for the copy. DeadlineExceeded: the storage is too slow.
        """
        check_manifest(manifest, manifest.total_bytes)
        name = Version.unpack(manifest.version)
        where = f"{self._storage.url}/{name}"
        if manifest.arena_id != str(name):
            raise SyncError(f"there is no arena {manifest.arena_id!r}: version {name} lies at {where}")
        try:
            staged = self._read(manifest, name, where)
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

    def _read(self, manifest: WeightManifest, name: Version, where: str) -> HeldWeights:
        began = self._clock.now()

        def check_time() -> None:
            if self._clock.now() - began > self._deadline_seconds:
                message = f"{self._holder} read {where} for {self._deadline_seconds:g} s without reaching its end"
                raise DeadlineExceeded(message, self._storage.url, self._deadline_seconds)

        with self._storage.reading(name) as reading:
            stored = read_stored(reading, where)
            if announced(stored.weights, "") != announced(manifest, ""):
                raise DigestMismatch(f"{where} is not the version {manifest.version} that was announced")
            check_files(reading, stored, where)
            buffer = self._buffers.take(manifest.total_bytes, f"a copy of version {name}")
            digests = read_tensors(reading, stored, buffer, check_time, self._threads)
        digest = self._proved(stored, digests) if self._verify == "full" else ""
        return HeldWeights(manifest, views_of(buffer, manifest), digest)

    def _proved(self, stored: StoredManifest, digests: Mapping[str, bytes]) -> str:
        weights = stored.weights
        entries = {meta.name: (meta.dtype, meta.shape, digests[meta.name]) for meta in weights.tensors}
        digest = root_digest(entries, weights.aliases)
        if digest != weights.digest:
            wrong = [repr(meta.name) for meta in weights.tensors if digests[meta.name].hex() != meta.digest]
            raise DigestMismatch(
                f"version {weights.version} was published as {weights.digest}, {self._holder} staged {digest}: "
                f"{len(wrong)} tensors differ, first {wrong[0]}"
            )
        return digest
