"""The number line of a type: how far apart two bit patterns lie, as an integer, with nothing merged.

A floating pattern u of w bits is read as a signed integer after its lower w-1 bits were inverted where the sign bit is
set. That orders all patterns as numbers, is its own inverse, and is a bijection: +0 is 0, -0 is -1, each NaN payload
has its own place. (The usual map negates instead, and so merges the two zeros.) Other types are their bits. Distances
wrap modulo 2^w and are kept in zigzag form, small for both signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import SyncError

_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES_ONLY = ("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2")  # no sign bit; two values in a byte


@dataclass(frozen=True)
class NumberLine:
    """`width` bytes per element; `fold` is the mask of inverted bits (0: the bits are the number).

    `mantissa` is where the exponent begins in the bits, None where there is no exponent.
    """

    width: int
    fold: int
    mantissa: int | None

    @property
    def unsigned(self) -> type[np.unsignedinteger[Any]]:
        """numpy's unsigned type of the width."""
        return _UNSIGNED[self.width]

    @property
    def arithmetic(self) -> tuple[np.uint64, np.uint64, np.uint64]:
        """`(fold, index of the top bit, mask of all bits)` as the kernels take them."""
        return np.uint64(self.fold), np.uint64(8 * self.width - 1), np.uint64((1 << 8 * self.width) - 1)


def line_of(dtype: torch.dtype) -> NumberLine:
    """The line of an element, or of half an element of a complex type.

    Raises:
        SyncError: elements are neither 1, 2, 4 nor 8 bytes wide.
    """
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    if width not in _UNSIGNED:
        raise SyncError(f"tensors of {dtype} have elements of {width} bytes, a delta knows 1, 2, 4 and 8")
    if not (dtype.is_floating_point or dtype.is_complex) or str(dtype) in _BYTES_ONLY:
        return NumberLine(width, 0, None)
    mantissa = round(-math.log2(torch.finfo(dtype).eps))
    return NumberLine(width, (1 << (8 * width - 1)) - 1, mantissa)


def bits_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The elements of a dense CPU tensor as unsigned integers, one-dimensional: a view, writes go through.

    Raises:
        SyncError: the tensor is not dense, or not on the CPU.
    """
    line = line_of(tensor.dtype)
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise SyncError(f"a delta reads dense CPU tensors, not {tensor.dtype} on {tensor.device} {tensor.stride()}")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    bits: NDArray[Any] = flat.view(torch.uint8).numpy().view(line.unsigned)
    return bits
