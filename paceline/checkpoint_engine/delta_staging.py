"""From a delta that arrived to the version, at a receiver that serves its base.

Nothing of the base is written. What is built is memory of this process, beside the base; whoever calls proves it by the
tree digest. For an engine that owns its memory the decoded change is kept, to bring the engine there in the pause.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.checkpoint_engine.private_memory import Buffers
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import DeltaRecord, WeightManifest
from paceline.core.weight_ports import StagedWeights
from paceline.weights.delta import Delta, PreparedDelta, apply, copy_and_apply, prepare, read_delta, subtract
from paceline.weights.layout import view_of, views_of


class PreparedChange:
    """Implements `core.weight_ports.StagedChange`."""

    def __init__(self, prepared: PreparedDelta, threads: int) -> None:
        self._prepared = prepared
        self._threads = threads
        self._cursor = prepared.cursor()

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring tensors that hold the base, by stored names, to the version in place."""
        apply(self._prepared, tensors, self._cursor, self._threads)

    def take_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Undo what `apply` did so far, bit for bit."""
        subtract(self._prepared, tensors, self._cursor, self._threads)


def fitting_delta(manifest: WeightManifest, base: StagedWeights | None) -> DeltaRecord | None:
    """The manifest's delta, if `base` is what it was made against.

    Raises:
        SyncError: it cannot be where it is said to be.
    """
    record = manifest.delta
    if record is None or base is None:
        return None
    if record.nbytes < 1 or record.offset < 0:
        raise SyncError(f"a delta of {record.nbytes} bytes at {record.offset} was announced")
    held = base.manifest
    return record if (held.version, held.digest) == (record.base_version, record.base_digest) else None


def read_announced(data: bytes | memoryview, record: DeltaRecord, manifest: WeightManifest) -> Delta:
    """Read a delta and compare it with what was announced.

    Raises:
        SyncError, DigestMismatch: see `read_delta`, or it is another one.
    """
    delta = read_delta(data)
    header = delta.header
    found = (header.base_version, header.base_digest, header.version, header.target_digest)
    if found != (record.base_version, record.base_digest, manifest.version, manifest.digest):
        raise DigestMismatch(f"the delta that arrived for version {manifest.version} is not the one announced")
    return delta


def prepare_change(delta: Delta, base: StagedWeights, threads: int) -> PreparedChange:
    """Decode for a move in place; raises what `weights.delta.prepare` raises."""
    prepared = prepare(delta, stored_tensors(base), base_digest=base.manifest.digest, threads=threads)
    return PreparedChange(prepared, threads)


def build(
    delta: Delta, base: StagedWeights, manifest: WeightManifest, buffers: Buffers, threads: int
) -> dict[str, torch.Tensor]:
    """Base and delta in memory of this process: tensors by all names.

    Raises:
        CapacityError: no memory for it. DigestMismatch, CoverageError, SyncError: as `weights.delta.copy_and_apply`.
    """
    buffer = buffers.take(manifest.total_bytes, f"a copy of version {manifest.version}")
    target = {meta.name: view_of(buffer, meta) for meta in manifest.tensors}
    copy_and_apply(delta, stored_tensors(base), target, base_digest=base.manifest.digest, threads=threads)
    return views_of(buffer, manifest)


def stored_tensors(held: StagedWeights) -> dict[str, torch.Tensor]:
    """What a delta speaks of: each tensor once. The references keep the memory, whoever releases it meanwhile."""
    tensors = held.tensors
    return {meta.name: tensors[meta.name] for meta in held.manifest.tensors}
