"""The guard against NaN and infinity in weights that are about to be published.

It looks at the values as they will be served, so after a cast (3.4e38 is finite in float32 and infinite in bfloat16),
and covers every floating type, the one-byte ones included, for which `torch.isfinite` is not implemented on a CPU.
Integers and bools pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.core.errors import NonFiniteWeights
from paceline.weights.coverage import matches

_NAMED_AT_MOST = 8
# Two 4-bit values per byte; the format has neither NaN nor infinity, and torch converts it to nothing.
_ALWAYS_FINITE = ("torch.float4_e2m1fn_x2",)


class ExponentTest(NamedTuple):
    """`element & mask`, in the mask's unsigned type, reaches `bound` exactly where an element is NaN or infinite."""

    mask: np.unsignedinteger[Any]
    bound: int


# Without its sign an IEEE number is the larger the larger its bits, and infinity and NaN are the largest: the bound is
# infinity, or the one NaN where there is no infinity.
_TESTS = {
    torch.float64: ExponentTest(np.uint64(0x7FFF_FFFF_FFFF_FFFF), 0x7FF0_0000_0000_0000),
    torch.float32: ExponentTest(np.uint32(0x7FFF_FFFF), 0x7F80_0000),
    torch.bfloat16: ExponentTest(np.uint16(0x7FFF), 0x7F80),
    torch.float16: ExponentTest(np.uint16(0x7FFF), 0x7C00),
    torch.float8_e5m2: ExponentTest(np.uint8(0x7F), 0x7C),
    torch.float8_e4m3fn: ExponentTest(np.uint8(0x7F), 0x7F),
}


def exponent_test(dtype: torch.dtype) -> ExponentTest | None:
    """The test on raw bits that finds what `count_nonfinite` counts; None: the type's bits allow no such test.

    A type without NaN gets what nothing reaches.
    """
    real = dtype.to_real()
    if real in _TESTS:
        return _TESTS[real]
    if not real.is_floating_point or str(real) in _ALWAYS_FINITE:
        return ExponentTest(np.uint64(0), 1)
    return None


def count_nonfinite(tensor: torch.Tensor) -> int:
    """Elements of a tensor that are NaN or infinite; a complex element counts per part.

    A sum is finite only if all its terms are, and costs a fifth of the exact test, which follows only when the sum is
    not (it may overflow although all terms are finite).
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or str(tensor.dtype) in _ALWAYS_FINITE:
        return 0
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if values.element_size() == 1:
        values = values.float()
    if math.isfinite(values.sum().item()):
        return 0
    return int(values.numel() - torch.isfinite(values).sum().item())


def nonfinite_error(counts: Mapping[str, int]) -> NonFiniteWeights:
    """The error for name -> count of non-finite elements; names the first few tensors."""
    bad = [f"{name!r}: {count}" for name, count in counts.items() if count]
    more = f" and {len(bad) - _NAMED_AT_MOST} more tensors" if len(bad) > _NAMED_AT_MOST else ""
    return NonFiniteWeights(
        f"NaN or infinite elements in {', '.join(bad[:_NAMED_AT_MOST])}{more}; nothing was published"
    )


def not_allowed(counts: Mapping[str, int], any_value: Sequence[str]) -> dict[str, int]:
    """Of these non-finite counts by name, the ones whose tensor no pattern of `any_value` names."""
    return {name: count for name, count in counts.items() if not matches(name, any_value)}
