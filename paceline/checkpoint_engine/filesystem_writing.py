"""From live tensors to a version's files: a shard is copied and digested while the one before it is written.

The manifest follows the last shard, the marker follows the manifest. Staging memory is two shards, or twice the largest
tensor where that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.filesystem_format import (
    Shard,
    ShardFile,
    StoredManifest,
    announced,
    encode_stored,
    shard_name,
    shard_of,
)
from paceline.checkpoint_engine.filesystem_reading import Buffers
from paceline.checkpoint_engine.filesystem_storage import FORMAT, MANIFEST_NAME, MARKER_NAME, VersionStorage
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.core.version import Version
from paceline.weights.digest import CopyJob, CopyResult, copy_and_digest
from paceline.weights.finite import nonfinite_error, not_allowed
from paceline.weights.layout import view_of
from paceline.weights.snapshot import SnapshotPlan
from paceline.weights.tree_digest import root_digest


class VersionWriter:
    """Writes versions to `storage`; `nonfinite`, `any_value` and `threads` as in `weights.snapshot.SnapshotWriter`."""

    def __init__(
        self,
        storage: VersionStorage,
        *,
        nonfinite: Literal["error", "off"],
        any_value: tuple[str, ...],
        threads: int,
    ) -> None:
        self._storage = storage
        self._nonfinite = nonfinite
        self._any_value = any_value
        self._threads = threads
        self._staging: list[torch.Tensor] = []

    def write(
        self,
        version: Version,
        plan: SnapshotPlan,
        shards: Sequence[tuple[TensorMeta, ...]],
        stored: Mapping[str, torch.Tensor],
    ) -> WeightManifest:
        """Write all of a version; the files of one that failed are the caller's to remove.

        Raises:
            NonFiniteWeights: the guard is on; all tensors with NaN or infinity are named.
            CapacityError: no memory for the staging buffers. OSError, SyncError: the storage failed.
        """
        digests: dict[str, bytes] = {}
        nonfinite: dict[str, int] = {}
        files: list[ShardFile] = []
        self._reserve([sum(meta.nbytes for meta in tensors) for tensors in shards])
        with ThreadPoolExecutor(1, thread_name_prefix="paceline-write") as pool:
            writing: Future[None] | None = None
            for index, tensors in enumerate(shards):
                shard = shard_of(tensors)
                staging = self._staging[index % len(self._staging)]
                result = self._fill(staging, shard, stored)
                digests.update(result.digests)
                nonfinite.update(not_allowed(result.nonfinite, self._any_value))
                files.append(ShardFile(shard_name(index, len(shards)), len(tensors), shard.nbytes))
                if writing is not None:
                    writing.result()
                if not nonfinite:
                    data = memoryview(staging.numpy().data)[: shard.nbytes - len(shard.header)]
                    writing = pool.submit(self._storage.write, version, files[-1].name, [shard.header, data])
            if writing is not None:
                writing.result()
        if nonfinite:
            raise nonfinite_error(nonfinite)
        return self._write_manifest(version, plan, tuple(files), digests)

    def _fill(self, staging: torch.Tensor, shard: Shard, stored: Mapping[str, torch.Tensor]) -> CopyResult:
        base = len(shard.header)
        jobs = [
            CopyJob(meta.name, stored[meta.name], view_of(staging, replace(meta, offset=place - base)))
            for meta, place in shard.places
        ]
        return copy_and_digest(jobs, self._nonfinite, self._threads)

    def _write_manifest(
        self, version: Version, plan: SnapshotPlan, files: tuple[ShardFile, ...], digests: Mapping[str, bytes]
    ) -> WeightManifest:
        entries = {meta.name: (meta.dtype, meta.shape, digests[meta.name]) for meta in plan.tensors}
        weights = WeightManifest(
            version=version.packed,
            base_version=None,
            tensors=tuple(replace(meta, digest=digests[meta.name].hex()) for meta in plan.tensors),
            aliases=plan.aliases,
            total_bytes=plan.total_bytes,
            digest=root_digest(entries, plan.aliases),
            arena_id=str(version),
            address="",
        )
        manifest, marker = encode_stored(StoredManifest(FORMAT, "full", weights, files))
        self._storage.write(version, MANIFEST_NAME, [manifest])
        self._storage.write(version, MARKER_NAME, [marker])
        return announced(weights, self._storage.url)

    def _reserve(self, sizes: Sequence[int]) -> None:
        """One buffer to fill and one to write from, each as large as the largest shard."""
        wanted = min(2, len(sizes))
        if len(self._staging) < wanted or self._staging[0].numel() < max(sizes):
            buffers = Buffers()
            self._staging = [buffers.take(max(sizes), f"{wanted} staging buffers") for _ in range(wanted)]
