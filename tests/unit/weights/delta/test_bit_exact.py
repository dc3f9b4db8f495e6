"""The delta compares and restores bits: every type, every density, values that compare as equal or as nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CoverageError, SyncError
from paceline.weights.delta import apply, count_changes, prepare, read_delta, subtract
from paceline.weights.delta.message import DENSE, DENSE_ZSTD
from paceline.weights.delta.planes import Level
from tests.unit.weights.delta.cases import (
    BASE_DIGEST,
    DTYPES,
    LEVELS,
    assert_arrives,
    changed_copy,
    copies,
    encoded,
    from_bits,
    random_tensor,
    same_bits,
    trained,
)

# Old -> new at eight places: zeros' signs, NaN payloads, infinities; places 3 and 7 do not change.
SPECIAL = {
    torch.bfloat16: (
        [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x3F80, 0x7FC0, 0x7F80, 0x3F80],
        [0x8000, 0x0000, 0x7FC1, 0x7FC1, 0xFFC0, 0x3F80, 0xFF80, 0x3F80],
    ),
    torch.float16: (
        [0x0000, 0x8000, 0x7E00, 0x7E01, 0x3C00, 0x7E00, 0x7C00, 0x3C00],
        [0x8000, 0x0000, 0x7E01, 0x7E01, 0xFE00, 0x3C00, 0xFC00, 0x3C00],
    ),
    torch.float32: (
        [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0x3F800000, 0x7FC00000, 0x7F800000, 0x3F800000],
        [0x80000000, 0x00000000, 0x7FC00001, 0x7FC00001, 0xFFC00000, 0x3F800000, 0xFF800000, 0x3F800000],
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", SPECIAL)
def test_bits_that_floats_do_not_tell_apart(dtype: torch.dtype, level: Level) -> None:
    old, new = (from_bits(bits, dtype) for bits in SPECIAL[dtype])
    assert torch.nonzero(old != new).flatten().tolist() == [2, 3, 4, 5, 6]  # what a comparison of floats says
    delta = assert_arrives({"w": old}, {"w": new}, level)
    assert delta.header.changed == 6
    tensors = {"w": old.clone()}
    prepared = prepare(read_delta(delta.data), tensors, base_digest=BASE_DIGEST)
    step = prepared.steps[0]
    assert delta.header.runs[0].mode in (DENSE, DENSE_ZSTD) or sorted(step.positions) == [0, 1, 2, 4, 5, 6]  # type: ignore[union-attr]
    apply(prepared, tensors, prepared.cursor())
    assert (1 / tensors["w"][0].float()).item() == float("-inf")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", SPECIAL)
def test_only_changed_places_are_sent(dtype: torch.dtype, level: Level) -> None:
    old, new = (from_bits(bits * 100, dtype) for bits in SPECIAL[dtype])
    delta = encoded({"w": old}, {"w": new}, level)
    step = prepare(read_delta(delta.data), {"w": old}, base_digest=BASE_DIGEST).steps[0]
    positions = np.sort(step.positions)  # type: ignore[union-attr]
    assert set((positions % 8).tolist()) == {0, 1, 2, 4, 5, 6}
    assert len(positions) == 600


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", SPECIAL)
def test_a_tensor_that_is_nan_everywhere(dtype: torch.dtype, level: Level) -> None:
    old = torch.full((3000,), float("nan"), dtype=dtype)
    other_payload = from_bits([SPECIAL[dtype][1][2]] * 3000, dtype)
    assert assert_arrives({"w": old}, {"w": old.clone()}, level).header.changed == 0
    assert assert_arrives({"w": old}, {"w": other_payload}, level).header.changed == 3000


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_changed_is_a_valid_delta(level: Level) -> None:
    base = {"w": torch.randn(5000).bfloat16(), "none": torch.empty(0, 3), "one": torch.tensor(1.5)}
    delta = assert_arrives(base, copies(base), level)
    assert (delta.header.changed, delta.header.body_bytes, delta.per_tensor) == (0, 0, {})
    assert len(delta.data) < 300


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_changed_is_never_larger_than_full(dtype: torch.dtype, level: Level) -> None:
    draw = np.random.default_rng(1)
    old, new = random_tensor(dtype, (4096,), draw), random_tensor(dtype, (4096,), draw)
    delta = assert_arrives({"w": old}, {"w": new}, level)
    assert delta.header.body_bytes <= old.nbytes


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_moves_every_bit_of_float32_is_smaller_than_full(level: Level) -> None:
    old = torch.randn(20000, generator=torch.Generator().manual_seed(2)) * 0.02
    delta = assert_arrives({"w": old}, {"w": old + 1e-6}, level)
    assert delta.header.body_bytes < 0.6 * old.nbytes


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 1.0]) | st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    level=st.sampled_from(LEVELS),
)
def test_any_tensor_any_density(
    dtype: torch.dtype, shape: tuple[int, ...], density: float, seed: int, level: Level
) -> None:
    draw = np.random.default_rng(seed)
    base = {"w": random_tensor(dtype, shape, draw), "scalar": random_tensor(dtype, (), draw)}
    target = {name: changed_copy(tensor, density, draw) for name, tensor in base.items()}
    delta = assert_arrives(base, target, level)
    assert delta.header.changed == count_changes(base, target)
    tensors = copies(base)
    prepared = prepare(read_delta(delta.data), tensors, base_digest=BASE_DIGEST)
    cursor = prepared.cursor()
    apply(prepared, tensors, cursor)
    assert same_bits(tensors, target)
    subtract(prepared, tensors, cursor)
    assert same_bits(tensors, base)


@pytest.mark.parametrize("level", LEVELS)
def test_two_threads_give_the_same_bytes(level: Level) -> None:
    pairs = {f"layer.{index}": trained(30000 + index, 1e-5, index) for index in range(6)}
    base, target = ({name: pair[which] for name, pair in pairs.items()} for which in (0, 1))
    assert encoded(base, target, level, threads=2).data == encoded(base, target, level).data


def test_classes_make_a_trained_step_smaller() -> None:
    old, new = trained(200_000, 1e-6, 3)
    sizes = {level: assert_arrives({"w": old}, {"w": new}, level).header.body_bytes for level in LEVELS}
    assert sizes["small"] < 0.8 * sizes["fast"]
    assert sizes["fast"] < 0.35 * 6 * int((old != new).sum())


def test_layouts_that_differ_are_refused_by_name() -> None:
    old = {"a": torch.zeros(3), "b": torch.zeros(2)}
    with pytest.raises(CoverageError, match=r"'b' is in one version only; 'c' is in one version only; 'a' was"):
        encoded(old, {"a": torch.zeros(4), "c": torch.zeros(2)}, "fast")


def test_tensors_that_are_not_dense_are_refused() -> None:
    wide = torch.zeros(4, 6).t()
    with pytest.raises(SyncError, match="dense CPU tensors"):
        encoded({"a": wide}, {"a": wide}, "fast")
