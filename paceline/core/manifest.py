"""What a published version of the weights is: names, dtypes, shapes, places, digest.

A manifest is made once, when a snapshot is captured, and travels before the bytes. A receiver checks it (sizes,
overlap, bounds) before it reserves memory or reads one byte.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_TENSORS = 1_000_000
MAX_NAME_LENGTH = 4096
MAX_DIMENSIONS = 32


class TensorMeta(msgspec.Struct, frozen=True):
    """One stored tensor: dense, row-major, little-endian bytes at `offset` of the arena.

    `digest` is the hex digest of the tensor's bytes (`weights.tree_digest.tensor_digest`), "" where it is not known.

    Example: `TensorMeta("embed.weight", "bfloat16", (98, 128), 0, 25088)`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str = ""


class DeltaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The delta that turns `base_version`, whose digest is `base_digest`, into the version of the manifest around it.

    `nbytes` is its length; it lies at `offset` of `arena_id`, which is the version's own arena or one beside it.
    `changed` of `elements` elements have other bits.

    Example: `DeltaRecord(4, "9f..", 18234, 12001, 1_000_000, "small", "arena-1", 2_000_000)`.
    """

    base_version: int
    base_digest: str
    nbytes: int
    changed: int
    elements: int
    level: Literal["fast", "small"]
    arena_id: str
    offset: int = 0


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of the weights; always the full description, whether or not there is a delta too.

    `aliases` maps each further name of a stored tensor (tied weights) to the stored name. `digest` is the hex root of
    the tree digest (`weights.digest`). `arena_id` names the arena that holds it, `address` tells a receiver where to
    ask for it (for shared memory: the path of the store's socket). `delta` is None where there is none.
    """

    version: int
    tensors: tuple[TensorMeta, ...]
    aliases: dict[str, str]
    total_bytes: int
    digest: str
    arena_id: str
    address: str
    delta: DeltaRecord | None = None


Layout = tuple[list[tuple[str, str, tuple[int, ...], int, int]], dict[str, str], int]


def layout_of(manifest: WeightManifest) -> Layout:
    """All that a manifest says of its tensors but their digests: equal for the versions of one model."""
    places = [(meta.name, meta.dtype, meta.shape, meta.offset, meta.nbytes) for meta in manifest.tensors]
    return places, manifest.aliases, manifest.total_bytes


class Captured(msgspec.Struct, frozen=True):
    """A snapshot that was taken and that nobody can ask for yet."""

    version: int
    digest: str
    total_bytes: int


class Published(msgspec.Struct, frozen=True):
    """A version that receivers can stage. `encode_seconds` is what comparing with the base and encoding took;
    `changed_share` is the share of elements whose bits differ from the base, None where nobody compared.
    """

    manifest: WeightManifest
    encode_seconds: float = 0.0
    changed_share: float | None = None
