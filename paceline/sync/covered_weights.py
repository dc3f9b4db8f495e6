"""A staged version under the engine's names: what the coverage plan chose, nothing copied.

Mapped, the engine then points at these tensors; copied, it fills its own memory from them. Both are undone in the same
way, by binding the version before, whose lease is held for as long as it may be needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import CopyProgress, StagedChange, StagedWeights
from paceline.weights.coverage import CoveragePlan

if TYPE_CHECKING:
    import torch


class CoveredWeights:
    """Implements `core.ports.StagedWeights`: `tensors` by the engine's names, `manifest` and `digest` as sent."""

    def __init__(self, staged: StagedWeights, plan: CoveragePlan) -> None:
        self._staged = staged
        self._plan = plan
        self._tensors = {name: staged.tensors[sent] for name, sent in plan.sources.items()}

    @property
    def sent(self) -> StagedWeights:
        """What is covered, under the sent names."""
        return self._staged

    @property
    def manifest(self) -> WeightManifest:
        return self._staged.manifest

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    @property
    def digest(self) -> str:
        return self._staged.digest

    @property
    def change(self) -> StagedChange | None:
        """As sent: by stored names."""
        return self._staged.change

    def drop_change(self) -> None:
        """As sent."""
        self._staged.drop_change()

    @property
    def copies(self) -> CopyProgress | None:
        """As sent."""
        return self._staged.copies

    @property
    def taken_bytes(self) -> int:
        """As sent."""
        return self._staged.taken_bytes

    @property
    def base_version(self) -> int | None:
        """As sent."""
        return self._staged.base_version

    @property
    def sources(self) -> Mapping[str, str]:
        """Engine's name -> sent name."""
        return self._plan.sources

    def served_as_sent(self, served: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the engine serves, under the sent names; tensors of the trainer alone come from the staged version."""
        by_sent = {sent: served[name] for name, sent in self._plan.sources.items()}
        return {name: by_sent.get(name, tensor) for name, tensor in self._staged.tensors.items()}

    def release(self) -> None:
        """Idempotent."""
        # Emptied in place: a caller that kept the mapping must not keep the lease.
        self._tensors.clear()
        self._staged.release()
