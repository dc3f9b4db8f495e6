"""Captured versions in the trainer's own memory, for engines that send them elsewhere afterwards.

One buffer is filled again and again; where the base of a delta has to stay there are two, filled in turns. A version
that was captured and never became a base is overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.checkpoint_engine.private_memory import Buffers
from paceline.core.manifest import Captured, WeightManifest
from paceline.weights.layout import view_of
from paceline.weights.snapshot import SnapshotPlan, SnapshotWriter


@dataclass(frozen=True)
class Snapshot:
    """A captured version: `manifest` describes it without a place, `buffer` (uint8) has its bytes."""

    manifest: WeightManifest
    buffer: torch.Tensor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors, as views."""
        return {meta.name: view_of(self.buffer, meta) for meta in self.manifest.tensors}

    @property
    def captured(self) -> Captured:
        """What the trainer learns of it."""
        return Captured(self.manifest.version, self.manifest.digest, self.manifest.total_bytes)


class SnapshotMemory:
    """The snapshot taken last, and the one that a delta may be made against."""

    def __init__(self, writer: SnapshotWriter) -> None:
        self._writer = writer
        self._kept: list[Snapshot] = []
        self._spare: list[torch.Tensor] = []

    def prepare(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[SnapshotPlan, dict[str, torch.Tensor]]:
        """As `SnapshotWriter.prepare`."""
        return self._writer.prepare(named_tensors)

    def capture(
        self, plan: SnapshotPlan, stored: dict[str, torch.Tensor], version: int, base_version: int | None
    ) -> Snapshot:
        """Copy the prepared tensors; keeps the bytes of `base_version`, if they are still here.

        Raises:
            NonFiniteWeights: see `SnapshotWriter.publish`. CapacityError: no memory for the buffer.
        """
        stay = [snapshot for snapshot in self._kept if snapshot.manifest.version == base_version]
        self._spare += [snapshot.buffer for snapshot in self._kept if snapshot not in stay]
        self._kept = stay
        buffer = self._spare.pop() if self._spare else Buffers().take(plan.total_bytes, "a snapshot of the weights")
        try:
            manifest = self._writer.publish(stored, buffer, version=version, arena_id="", address="")
        except BaseException:  # whatever it was, the memory is for the next one
            self._spare.append(buffer)
            raise
        self._kept.append(Snapshot(manifest, buffer))
        return self._kept[-1]

    def find(self, version: int | None) -> Snapshot | None:
        """The snapshot of a version, if its bytes are still here."""
        return next((snapshot for snapshot in self._kept if snapshot.manifest.version == version), None)

    def close(self) -> None:
        """Keep nothing any more."""
        self._kept, self._spare = [], []
