"""The codecs that `paceline bench codec` compares: ours, and the usual forms of a lossless delta, each per tensor.

int32 index+value   positions as int32 and the new elements: what sparse updates of RL systems send
xor+zstd-1          old XOR new, then zstd at level 1
full zstd-1         the new weights, zstd at level 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard

from paceline.weights.delta import apply, copy_and_apply, encode, prepare, read_delta
from paceline.weights.delta.number_line import bits_of
from paceline.weights.delta.planes import Level

Tensors = Mapping[str, torch.Tensor]
_DIGEST = "0" * 32


@dataclass(frozen=True)
class Codec:
    """`apply` writes the target into other memory. `in_place` decodes, and returns what moves the weights."""

    name: str
    encode: Callable[[Tensors, Tensors], Any]
    size: Callable[[Any], int]
    apply: Callable[[Any, Tensors, Tensors], None]
    in_place: Callable[[Any, Tensors], Callable[[], None]] | None = None


def codecs() -> list[Codec]:
    """Ours first."""
    return [
        _ours("fast"),
        _ours("small"),
        Codec("int32 index+value", _index_encode, lambda m: sum(i.nbytes + v.nbytes for i, v in m), _index_apply),
        Codec("xor+zstd-1", _xor_encode, _sum_of_lengths, _xor_apply),
        Codec("full zstd-1", _full_encode, _sum_of_lengths, _full_apply),
    ]


def _ours(level: Level) -> Codec:
    def encoded(base: Tensors, target: Tensors) -> bytes:
        delta = encode(
            base, target, level, base_version=0, version=1, base_digest=_DIGEST, target_digest=_DIGEST, threads=1
        )
        return delta.data

    def applied(message: bytes, base: Tensors, target: Tensors) -> None:
        copy_and_apply(read_delta(message), base, target, base_digest=_DIGEST)

    def in_place(message: bytes, tensors: Tensors) -> Callable[[], None]:
        prepared = prepare(read_delta(message), tensors, base_digest=_DIGEST)
        cursor = prepared.cursor()
        return lambda: apply(prepared, tensors, cursor)

    return Codec(f"paceline-{level}", encoded, len, applied, in_place)


def _sum_of_lengths(messages: list[bytes]) -> int:
    return sum(len(message) for message in messages)


def _index_encode(base: Tensors, target: Tensors) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for name in base:
        new = bits_of(target[name])
        index = np.flatnonzero(bits_of(base[name]) != new).astype(np.int32)
        found.append((index, new[index]))
    return found


def _index_apply(message: list[tuple[Any, Any]], base: Tensors, target: Tensors) -> None:
    for name, (index, values) in zip(base, message, strict=True):
        new = bits_of(target[name])
        np.copyto(new, bits_of(base[name]))
        new[index] = values


def _xor_encode(base: Tensors, target: Tensors) -> list[bytes]:
    packer = zstandard.ZstdCompressor(level=1)
    return [packer.compress(np.bitwise_xor(bits_of(base[name]), bits_of(target[name])).data) for name in base]


def _xor_apply(message: list[bytes], base: Tensors, target: Tensors) -> None:
    unpacker = zstandard.ZstdDecompressor()
    for name, packed in zip(base, message, strict=True):
        old = bits_of(base[name])
        np.bitwise_xor(old, np.frombuffer(unpacker.decompress(packed), old.dtype), out=bits_of(target[name]))


def _full_encode(base: Tensors, target: Tensors) -> list[bytes]:
    packer = zstandard.ZstdCompressor(level=1)
    return [packer.compress(bits_of(target[name]).data) for name in base]


def _full_apply(message: list[bytes], base: Tensors, target: Tensors) -> None:
    unpacker = zstandard.ZstdDecompressor()
    for name, packed in zip(base, message, strict=True):
        new = bits_of(target[name])
        np.copyto(new, np.frombuffer(unpacker.decompress(packed), new.dtype))
