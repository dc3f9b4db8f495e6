"""What a published version of the weights is: names, dtypes, shapes, places, digest.

A manifest is made once, when a snapshot is captured, and travels before the bytes. A receiver checks it (sizes,
overlap, bounds) before it reserves memory or reads one byte.
"""

from __future__ import annotations

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


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of the weights.

    `aliases` maps each further name of a stored tensor (tied weights) to the stored name. `digest` is the hex root of
    the tree digest (`weights.digest`). `base_version` is None for a full snapshot. `arena_id` names the arena that
    holds it, `address` tells a receiver where to ask for it (for shared memory: the path of the store's socket).
    """

    version: int
    base_version: int | None
    tensors: tuple[TensorMeta, ...]
    aliases: dict[str, str]
    total_bytes: int
    digest: str
    arena_id: str
    address: str
