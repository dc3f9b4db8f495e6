"""HeldWeights: staged weights as every checkpoint engine hands them out; an action ends their lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import CopyProgress, StagedChange


@dataclass(frozen=True)
class Taken:
    """A version that was made of `base_version` and `nbytes` of deltas."""

    base_version: int
    nbytes: int


class HeldWeights:
    """Implements `core.ports.StagedWeights`.

    `on_release` runs once, after the tensors are let go; None: their memory is all there is to free. `digest_by`
    names who took the digest, where that may be another than the holder. Where not the full version was taken,
    `taken` says what was; `change` and `copies` are for engines that own their memory.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        tensors: dict[str, torch.Tensor],
        digest: str,
        on_release: Callable[[], None] | None = None,
        digest_by: str = "",
        taken: Taken | None = None,
        change: StagedChange | None = None,
        copies: CopyProgress | None = None,
    ) -> None:
        self._manifest = manifest
        self._tensors = tensors
        self._digest = digest
        self._on_release = on_release
        self._held = True
        self._taken = taken
        self._change = change
        self._copies = copies
        self.digest_by = digest_by

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._held

    @property
    def manifest(self) -> WeightManifest:
        """What is held."""
        return self._manifest

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All names, aliases included.

        Raises:
            SyncError: it was released.
        """
        if not self._held:
            raise SyncError(f"version {self._manifest.version} was released")
        return self._tensors

    @property
    def digest(self) -> str:
        """Hex digest that was computed over the staged bytes; "" when verification is off."""
        return self._digest

    @property
    def copies(self) -> CopyProgress | None:
        """Of those who copy from the same memory."""
        return self._copies

    @property
    def taken_bytes(self) -> int:
        """What was taken from the published version."""
        return self._manifest.total_bytes if self._taken is None else self._taken.nbytes

    @property
    def base_version(self) -> int | None:
        """The version that a delta was applied to."""
        return None if self._taken is None else self._taken.base_version

    @property
    def change(self) -> StagedChange | None:
        """How an engine that holds the base in memory of its own gets here."""
        return self._change

    def drop_change(self) -> None:
        """It was used, for good."""
        self._change = None

    def release(self) -> None:
        """Idempotent. Memory and lease are free once no tensor of this version is referenced any more."""
        if self._held:
            self._held = False
            # Emptied in place: a caller that kept the mapping must not keep the memory.
            self._tensors.clear()
            self._change = None
            end_lease, self._on_release = self._on_release, None
            if end_lease is not None:
                end_lease()
