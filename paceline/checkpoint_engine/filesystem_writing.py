"""From a captured snapshot to a version's files: the manifest follows the last shard, and the marker the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from paceline.checkpoint_engine.delta_sending import Attempt
from paceline.checkpoint_engine.filesystem_format import (
    DELTA_NAME,
    ShardFile,
    StoredManifest,
    announced,
    encode_stored,
    shard_name,
    shard_of,
)
from paceline.checkpoint_engine.filesystem_storage import FORMAT, MANIFEST_NAME, MARKER_NAME, VersionStorage
from paceline.checkpoint_engine.snapshots import Snapshot
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.core.version import Version


class VersionWriter:
    """Writes versions to `storage`; the files of one that failed are the caller's to remove."""

    def __init__(self, storage: VersionStorage) -> None:
        self._storage = storage

    def write(
        self, version: Version, snapshot: Snapshot, shards: Sequence[tuple[TensorMeta, ...]], attempt: Attempt
    ) -> WeightManifest:
        """Write all tensors in these shards, and the delta where there is one; without shards the delta alone.

        Raises:
            OSError, SyncError: the storage failed.
        """
        files = self._write_shards(version, snapshot, shards)
        if attempt.delta is not None:
            self._storage.write(version, DELTA_NAME, [attempt.delta.data])
        weights = replace(snapshot.manifest, arena_id=str(version), delta=attempt.record(str(version)))
        stored = StoredManifest(FORMAT, "full" if shards else "delta", weights, files)
        manifest, marker = encode_stored(stored)
        self._storage.write(version, MANIFEST_NAME, [manifest])
        self._storage.write(version, MARKER_NAME, [marker])
        return announced(weights, self._storage.url)

    def _write_shards(
        self, version: Version, snapshot: Snapshot, shards: Sequence[tuple[TensorMeta, ...]]
    ) -> tuple[ShardFile, ...]:
        data = memoryview(snapshot.buffer.numpy().data)
        files: list[ShardFile] = []
        for index, tensors in enumerate(shards):
            shard = shard_of(tensors)
            files.append(ShardFile(shard_name(index, len(shards)), len(tensors), shard.nbytes))
            parts = [data[meta.offset : meta.offset + meta.nbytes] for meta, _ in shard.places]
            self._storage.write(version, files[-1].name, [shard.header, *parts])
        return tuple(files)
