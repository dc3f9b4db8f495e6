"""Seams of the weight path: the two ends of a checkpoint engine, and what a replica holds of the weights.

As in `core.ports`: short, each with at least two implementations under one contract suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.core.commands import ReplicaReport, StageCommand, StageReport, SwapCommand
from paceline.core.manifest import WeightManifest
from paceline.core.ports import InferenceEngine

if TYPE_CHECKING:
    import torch


class WeightSender(Protocol):
    """Trainer's end of a checkpoint engine: turns live tensors into a published version."""

    def capture(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        """Copy the tensors into a free arena and take the digest. Raises SyncError classes; never blocks on leases."""
        ...

    def blocking_holders(self) -> Sequence[str]:
        """Names of lease holders that keep `capture` from finding a free arena; empty when one is free."""
        ...

    def close(self) -> None:
        """Release arenas and sockets."""
        ...


class StagedWeights(Protocol):
    """One version, whole and verified, mapped or copied beside the served one; holds its lease until `release`."""

    @property
    def manifest(self) -> WeightManifest: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All names, aliases included (aliased names share storage)."""
        ...

    @property
    def digest(self) -> str:
        """Hex digest that the receiver computed over the staged bytes; "" when verification is off."""
        ...

    def release(self) -> None:
        """Give up the lease; the tensors must not be used afterwards."""
        ...


class WeightReceiver(Protocol):
    """Replica's end of a checkpoint engine."""

    def stage(self, manifest: WeightManifest) -> StagedWeights:
        """Fetch, map or copy, touch every page, verify. Raises SyncError classes; leaves nothing behind on error."""
        ...

    def close(self) -> None: ...


class WeightTransactionPort(Protocol):
    """The versions a replica holds (`sync.weight_transaction`), as its decode loop sees them."""

    @property
    def serving(self) -> StagedWeights | None: ...

    def report(self) -> ReplicaReport: ...

    def stage(self, command: StageCommand, engine: InferenceEngine) -> StageReport: ...

    def swap(self, command: SwapCommand, engine: InferenceEngine) -> StagedWeights | None: ...

    def announce(self, engine: InferenceEngine) -> None: ...

    def discard(self, version: int) -> None: ...

    def close(self) -> None: ...


class ServingBoard(Protocol):
    """Tells processes outside what a replica serves, so that they can check it for themselves."""

    def publish(self, version: int, digest: str, manifest: WeightManifest, served: Mapping[str, torch.Tensor]) -> None:
        """`served`: what the engine reads, under the names of the manifest."""
