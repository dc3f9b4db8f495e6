"""What a receiver hashes of a version before it believes it, and what it remembers for the next one.

    full     every byte
    changed  only tensors whose published digest (or place, type or shape) differs from the one of the version verified
             before, and all of them at the first; the others are taken on trust in this arena (their bytes were
             verified in an earlier one)
    off      nothing

The published tensor digests must add up to the published root in each mode but off, so a tensor that is not hashed is
at least claimed to be what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import torch
import xxhash

from paceline.core.errors import DigestMismatch
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.weights.digest import digest_each
from paceline.weights.tree_digest import root_digest

VerifyMode = Literal["full", "changed", "off"]


def claim_of(manifest: WeightManifest) -> str:
    """Hex digest of what a manifest says lies where: only who was told the same may rely on another's digest."""
    told = (manifest.tensors, manifest.aliases, manifest.total_bytes, manifest.digest)
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(told, order="sorted"))


class Verification:
    """One receiver's verification. `holder` names it in errors; `threads` hash."""

    def __init__(self, mode: VerifyMode, *, holder: str, threads: int = 1) -> None:
        self.mode = mode
        self._holder = holder
        self._threads = threads
        self._known: dict[str, TensorMeta] = {}

    @property
    def scope(self) -> Literal["full", "changed"]:
        """What the next version gets; "changed" is "full" until a version was verified."""
        return "changed" if self.mode == "changed" and self._known else "full"

    def digest(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> str:
        """Hex root digest of the tensors (by stored name), hashed as far as `scope` says."""
        skipped = {
            meta.name
            for meta in manifest.tensors
            if self.scope == "changed" and meta.digest and self._known.get(meta.name) == meta
        }
        hashed = digest_each(
            {meta.name: tensors[meta.name] for meta in manifest.tensors if meta.name not in skipped}, self._threads
        )
        entries = {
            meta.name: (meta.dtype, meta.shape, hashed.get(meta.name) or bytes.fromhex(meta.digest))
            for meta in manifest.tensors
        }
        return root_digest(entries, manifest.aliases)

    def accept(self, manifest: WeightManifest, digest: str, by: str) -> None:
        """Compare what `by` has computed with what was published, and remember the version.

        Raises:
            DigestMismatch: they differ.
        """
        if digest != manifest.digest:
            taken = "" if by == self._holder else f" (as taken by {by})"
            raise DigestMismatch(
                f"version {manifest.version} was published as {manifest.digest}, {self._holder} staged {digest}{taken}"
            )
        self._known = {meta.name: meta for meta in manifest.tensors if meta.digest}
