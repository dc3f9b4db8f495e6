"""HeldWeights: staged weights as every checkpoint engine hands them out; an action ends their lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest


class HeldWeights:
    """Implements `core.ports.StagedWeights`.

    `on_release` runs once, after the tensors are let go; None: their memory is all there is to free. `digest_by`
    names who took the digest, where that may be another than the holder.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        tensors: dict[str, torch.Tensor],
        digest: str,
        on_release: Callable[[], None] | None = None,
        digest_by: str = "",
    ) -> None:
        self._manifest = manifest
        self._tensors = tensors
        self._digest = digest
        self._on_release = on_release
        self._held = True
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

    def release(self) -> None:
        """Idempotent. Memory and lease are free once no tensor of this version is referenced any more."""
        if self._held:
            self._held = False
            # Emptied in place: a caller that kept the mapping must not keep the memory.
            self._tensors.clear()
            end_lease, self._on_release = self._on_release, None
            if end_lease is not None:
                end_lease()
