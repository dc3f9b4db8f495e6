"""The tree digest over plain bytes; needs no torch, so that any process can take it.

    leaf    xxh3-128 of each 1 MiB of a tensor's bytes, counted from the tensor's start (the last leaf may be shorter)
    tensor  xxh3-128 over its leaf digests, 16 bytes each, in order
    root    xxh3-128 over a canonical text: (name, dtype, shape, tensor digest) sorted by name, then the sorted aliases

Leaves depend on nothing but their own bytes, so threads, shards and pipelines may take them apart and in any order.
Which name of a tied tensor is the stored one changes nothing: the smallest name of each group stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

LEAF_BYTES = 1 << 20
_SCHEME = "paceline-tree-1"


def leaf_digest(data: bytes | memoryview) -> bytes:
    """Digest of one leaf: at most `LEAF_BYTES` contiguous bytes."""
    return xxhash.xxh3_128_digest(data)


def tensor_digest(leaves: Iterable[bytes]) -> bytes:
    """Digest of a tensor from its leaf digests in order; an empty tensor has no leaves."""
    return xxhash.xxh3_128_digest(b"".join(leaves))


def bytes_digest(data: bytes | memoryview) -> bytes:
    """Digest of a tensor from its bytes (one-dimensional, contiguous)."""
    return tensor_digest(leaf_digests(data))


def leaf_digests(data: bytes | memoryview) -> list[bytes]:
    """Digests of the leaves of a run of bytes that starts at a leaf (one-dimensional, contiguous)."""
    view = memoryview(data)
    return [leaf_digest(view[start : start + LEAF_BYTES]) for start in range(0, len(view), LEAF_BYTES)]


def root_digest(entries: Mapping[str, tuple[str, tuple[int, ...], bytes]], aliases: Mapping[str, str]) -> str:
    """Hex root over stored name -> (dtype, shape, tensor digest) and alias -> stored name."""
    representative = {name: name for name in entries}
    for alias, stored in aliases.items():
        representative[stored] = min(representative[stored], alias)
    tensors: list[Any] = sorted(
        [representative[name], dtype, list(shape), digest.hex()] for name, (dtype, shape, digest) in entries.items()
    )
    names = [*entries, *aliases]
    further = sorted(
        [name, representative[aliases.get(name, name)]]
        for name in names
        if name != representative[aliases.get(name, name)]
    )
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([_SCHEME, tensors, further]))
