"""The non-finite guard: every floating type, after the cast, with name and count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.errors import NonFiniteWeights
from paceline.weights.digesting_copy import CopyJob, copy_and_digest
from paceline.weights.finite import count_nonfinite, exponent_test, nonfinite_error
from paceline.weights.snapshot import SnapshotWriter

FLOATS = [
    value
    for name, value in sorted(vars(torch).items())
    if isinstance(value, torch.dtype) and value.is_floating_point and str(value) == f"torch.{name}"
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_values_of_every_floating_type_pass(dtype: torch.dtype) -> None:
    assert count_nonfinite(torch.ones(8, dtype=torch.uint8).view(dtype)) == 0


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t.itemsize > 1], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_counted(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(1000).to(dtype)
    tensor[777] = bad
    assert count_nonfinite(tensor) == 1


@pytest.mark.parametrize(
    ("dtype", "byte", "count"),
    [
        (torch.float8_e4m3fn, 0x7F, 1),
        (torch.float8_e4m3fn, 0x7E, 0),
        (torch.float8_e5m2, 0x7C, 1),
        (torch.float8_e4m3fnuz, 0x80, 1),
        (torch.float8_e8m0fnu, 0xFF, 1),
    ],
)
def test_bad_bytes_of_one_byte_types(dtype: torch.dtype, byte: int, count: int) -> None:
    assert count_nonfinite(torch.tensor([1, byte, 2], dtype=torch.uint8).view(dtype)) == count


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t.itemsize <= 2], ids=str)
def test_raw_bits_tell_what_the_count_tells_for_every_value(dtype: torch.dtype) -> None:
    bits: NDArray[Any] = np.arange(1 << 8 * dtype.itemsize, dtype=(np.uint8, np.uint16)[dtype.itemsize - 1])
    values = torch.from_numpy(bits).view(dtype)
    test = exponent_test(dtype)
    if test is None:
        assert dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    elif dtype is torch.float4_e2m1fn_x2:
        assert int((bits & test.mask).max()) < test.bound
    else:
        assert np.array_equal((bits & test.mask) >= test.bound, ~torch.isfinite(values.float()).numpy())


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t.itemsize > 1] + [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("place", [0, 3, 2_000, 2_047, 2_048, 2_050])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_copy_counts_a_bad_element_anywhere(dtype: torch.dtype, place: int, bad: float) -> None:
    source = torch.full((2_051,), torch.finfo(dtype).max, dtype=dtype)
    source[7] = -source[7]
    target = torch.zeros_like(source)
    assert copy_and_digest([CopyJob("w", source, target)], "error").nonfinite == {}
    source[place] = bad
    assert copy_and_digest([CopyJob("w", source, target)], "error").nonfinite == {"w": 1}
    assert copy_and_digest([CopyJob("w", source, target)], "off").nonfinite == {}
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_opposite_infinities_do_not_cancel() -> None:
    assert count_nonfinite(torch.tensor([math.inf, -math.inf, 1.0])) == 2


def test_a_sum_that_overflows_is_no_alarm() -> None:
    assert count_nonfinite(torch.full((4,), 3e38)) == 0
    assert count_nonfinite(torch.full((4,), 6e4, dtype=torch.float16)) == 0


def test_complex_parts_count() -> None:
    assert count_nonfinite(torch.tensor([complex(math.nan, math.inf), 1 + 1j])) == 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint32, torch.bool])
def test_integers_and_bools_pass(dtype: torch.dtype) -> None:
    assert count_nonfinite(torch.full((8,), 255, dtype=torch.uint8).view(dtype)) == 0


def test_the_error_names_tensors_and_counts() -> None:
    assert "'w': 1, 'x': 2;" in nonfinite_error({"w": 1, "v": 0, "x": 2}).message
    assert "and 92 more tensors" in nonfinite_error({f"t{i}": 1 for i in range(100)}).message


def test_a_value_that_is_infinite_only_after_the_cast_is_caught() -> None:
    named = [("w", torch.tensor([3.4e38, 1.0]))]
    writer = SnapshotWriter(dtype="bfloat16", keep=(), nonfinite="error", threads=1)
    plan, stored = writer.prepare(named)
    with pytest.raises(NonFiniteWeights, match="'w': 1"):
        writer.publish(
            stored, torch.zeros(plan.total_bytes, dtype=torch.uint8), version=1, arena_id="a", address="here"
        )
    kept = SnapshotWriter(dtype="bfloat16", keep=("w",), nonfinite="error", threads=1)
    plan, stored = kept.prepare(named)
    kept.publish(stored, torch.zeros(plan.total_bytes, dtype=torch.uint8), version=1, arena_id="a", address="here")


def test_a_bad_element_beyond_the_first_leaf_and_in_a_strided_source_is_found() -> None:
    big = torch.zeros(1_000_000)
    big[999_999] = math.nan
    strided = torch.zeros(3, 2).t()
    strided[1, 2] = math.inf
    writer = SnapshotWriter(dtype=None, keep=(), nonfinite="error", threads=2)
    plan, stored = writer.prepare([("big", big), ("strided", strided), ("good", torch.ones(3))])
    with pytest.raises(NonFiniteWeights, match="'big': 1, 'strided': 1;"):
        writer.publish(
            stored, torch.zeros(plan.total_bytes, dtype=torch.uint8), version=1, arena_id="a", address="here"
        )
