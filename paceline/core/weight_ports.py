"""Seams of the weight path: the two ends of a checkpoint engine, and what a replica holds of the weights.

As in `core.ports`: short, each with at least two implementations under one contract suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from paceline.core.commands import ReplicaReport, StageCommand, StageReport, SwapCommand
from paceline.core.manifest import Captured, Published, WeightManifest
from paceline.core.ports import InferenceEngine

if TYPE_CHECKING:
    import torch


class WeightSender(Protocol):
    """Trainer's end of a checkpoint engine: turns live tensors into a published version.

    States: empty -> captured -> published; a capture drops what was captured and not published. `capture` and
    `publish` never overlap.
    """

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """Copy the tensors and take the digest; they may change again once this returns, and nobody can stage the
        version yet. `base_version`: a published version whose bytes shall stay, to make a delta against.

        Raises SyncError classes; never blocks on leases.
        """
        ...

    def publish(self) -> Published:
        """Make the captured version one that receivers can stage, with a delta where that is worth it. Reads nothing of
        the trainer's, so it may run beside the next step. Raises SyncError classes; nothing is published then.
        """
        ...

    def blocking_holders(self) -> Sequence[str]:
        """Names of lease holders that keep `capture` from finding a free arena; empty when one is free."""
        ...

    def close(self) -> None:
        """Release arenas and sockets."""
        ...


class StagedChange(Protocol):
    """What brings memory that holds one version to another one in place, and back; it remembers how far it came.

    `tensors` are by the stored names of the manifest, and the same in each call.
    """

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on to the end. What stops it leaves whole tensors, or whole parts of them, of one of the two versions."""
        ...

    def take_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Undo what `apply` did, bit for bit."""
        ...


class CopyProgress(Protocol):
    """Where other copies of the same version on this node are; a hint alone. Places are numbers of pieces, from 0."""

    def place(self) -> int | None:
        """Where one was last; None where none runs now, or it is not known."""
        ...

    def tell(self, place: int) -> None:
        """This copy comes to that place."""
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

    @property
    def change(self) -> StagedChange | None:
        """How an engine that holds `base_version` in memory of its own gets here; None where it was not prepared."""
        ...

    def drop_change(self) -> None:
        """It was used, for good: its memory may go."""
        ...

    @property
    def copies(self) -> CopyProgress | None:
        """Of those who copy from the same memory; None where nobody else does."""
        ...

    @property
    def taken_bytes(self) -> int:
        """What was taken from the published version to have it here."""
        ...

    @property
    def base_version(self) -> int | None:
        """The version (packed) to which a delta was applied; None: the full version was taken."""
        ...

    def release(self) -> None:
        """Give up the lease; the tensors must not be used afterwards."""
        ...


class WeightReceiver(Protocol):
    """Replica's end of a checkpoint engine."""

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> StagedWeights:
        """Fetch, map or copy, touch every page, verify. Raises SyncError classes; leaves nothing behind on error.

        `base` is what this replica serves and stays held until this returns: with it a delta may be taken. `apply` is
        the engine's way: for `copied` the change from the base is prepared too, where there is one.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class PatchableEngine(Protocol):
    """What an engine of capability `copied` may have: its memory is CPU memory that others bring to a new version."""

    def patched(self, version: int) -> None:
        """`served_tensors` were changed in place and hold this version; in-flight sequences follow the KV policy."""
        ...


@runtime_checkable
class FillableEngine(Protocol):
    """What an engine of capability `copied` may have: a version that is sent whole is copied into `served_tensors` by
    the replica, which proves each piece on the way. `bind` is called for the first version, and where that cannot be.
    """

    def filled(self, version: int) -> None:
        """`served_tensors` hold this version, proved; nothing is written to them. The KV policy is `bind`'s."""
        ...


class WeightTransactionPort(Protocol):
    """The versions a replica holds (`sync.weight_transaction`), as its decode loop sees them."""

    @property
    def serving(self) -> StagedWeights | None: ...

    def report(self) -> ReplicaReport: ...

    def stage(self, command: StageCommand, engine: InferenceEngine) -> StageReport: ...

    def swap(self, command: SwapCommand, engine: InferenceEngine) -> StagedWeights | None: ...

    def audit(self, engine: InferenceEngine) -> None:
        """After the pause, before a swap is reported: prove what was changed in place. Raises DigestMismatch."""
        ...

    def announce(self, engine: InferenceEngine) -> None: ...

    def discard(self, version: int) -> None: ...

    def close(self) -> None: ...


class ServingBoard(Protocol):
    """Tells processes outside what a replica serves, so that they can check it for themselves."""

    def publish(self, version: int, digest: str, manifest: WeightManifest, served: Mapping[str, torch.Tensor]) -> None:
        """`served`: what the engine reads, under the names of the manifest."""
        ...

    def withdraw(self) -> None:
        """Until the next `publish` nothing is said of what is served: memory is about to change in place."""
