"""What the tests of the delta share: versions of tensors as bits, and one way through the whole codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.weights.delta import EncodedDelta, copy_and_apply, encode, read_delta
from paceline.weights.delta.number_line import bits_of
from paceline.weights.delta.planes import Level

BASE_DIGEST = "b" * 32
TARGET_DIGEST = "a" * 32
LEVELS: tuple[Level, ...] = ("fast", "small")
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64,
    torch.uint64, torch.complex64, torch.complex128,
)  # fmt: skip

Tensors = Mapping[str, torch.Tensor]


def from_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor with these bit patterns."""
    raw = np.array(bits, dtype=f"<u{dtype.itemsize}").view(np.uint8)
    return torch.from_numpy(raw).view(dtype)


def changed_copy(tensor: torch.Tensor, density: float, draw: np.random.Generator) -> torch.Tensor:
    """A copy in which about `density` of the elements have other bits: far ones, near ones, other signs."""
    copy = tensor.clone()
    bits = bits_of(copy)
    where = np.flatnonzero(draw.random(len(bits)) < density)
    kind = draw.integers(0, 3, len(where))
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1)) if tensor.dtype != torch.bool else bits.dtype.type(1)
    near = bits[where] + draw.integers(1, 4, len(where)).astype(bits.dtype)
    far = random_bits(tensor.dtype, len(where), draw)
    new = np.select([kind == 0, kind == 1], [near, bits[where] ^ top], far)
    bits[where] = new & bits.dtype.type(1) if tensor.dtype == torch.bool else new
    return copy


def random_bits(dtype: torch.dtype, count: int, draw: np.random.Generator) -> NDArray[Any]:
    """Any bit patterns of a type's elements (halves of complex ones); bools are 0 or 1."""
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    high = 2 if dtype == torch.bool else 1 << (8 * width)
    return draw.integers(0, high, count, dtype=np.uint64).astype(f"<u{width}")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], draw: np.random.Generator) -> torch.Tensor:
    """A tensor of any bit patterns: NaN payloads, infinities and both zeros among them."""
    count = int(np.prod(shape)) * (2 if dtype.is_complex else 1)
    return torch.from_numpy(random_bits(dtype, count, draw).view(np.uint8)).view(dtype).reshape(shape)


def trained(count: int, step: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights of the usual size before and after steps of about `step` on float32 masters."""
    draw = torch.Generator().manual_seed(seed)
    masters = torch.randn(count, generator=draw) * 0.02
    return masters.bfloat16(), (masters + step * torch.randn(count, generator=draw)).bfloat16()


def encoded(base: Tensors, target: Tensors, level: Level, threads: int = 1) -> EncodedDelta:
    return encode(
        base, target, level, base_version=4, version=5, base_digest=BASE_DIGEST, target_digest=TARGET_DIGEST,
        threads=threads,
    )  # fmt: skip


def same_bits(one: Tensors, other: Tensors) -> bool:
    """Whether all tensors have the same bits; a float comparison would not see zeros' signs and NaN."""
    return one.keys() == other.keys() and all(np.array_equal(bits_of(one[name]), bits_of(other[name])) for name in one)


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_arrives(base: Tensors, target: Tensors, level: Level) -> EncodedDelta:
    """Encode, read, write into other memory that holds something else; the target's bits must be there."""
    delta = encoded(base, target, level)
    other = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    before = copies(base)
    copy_and_apply(read_delta(delta.data), base, other, base_digest=BASE_DIGEST)
    assert same_bits(other, target)
    assert same_bits(base, before)
    return delta
