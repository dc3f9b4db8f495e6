"""The parts by themselves: number line, planes by two ways, tables, and the numbers that the entropy coder carries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import SyncError
from paceline.weights.delta import entropy, scan, tables
from paceline.weights.delta.number_line import bits_of, line_of
from paceline.weights.delta.planes import Level, planes_of
from paceline.weights.delta.torch_planes import torch_planes
from tests.unit.weights.delta.cases import DTYPES, LEVELS, changed_copy, from_bits, random_tensor, trained


def test_all_patterns_of_two_bytes_keep_apart_and_are_in_order() -> None:
    every = from_bits(list(range(1 << 16)), torch.bfloat16)
    bits = every.view(torch.int16).int()
    fold = line_of(torch.bfloat16).fold
    place = (bits ^ ((bits >> 15) & fold)).numpy()
    assert len(set(place.tolist())) == 1 << 16
    finite = torch.isfinite(every)
    order = np.argsort(place[finite.numpy()])
    values = every[finite].double().numpy()[order]
    assert np.all(np.diff(values) >= 0)
    assert (place[0x0000], place[0x8000]) == (0, -1)


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.bfloat16, 7), (torch.float16, 10), (torch.float8_e4m3fn, 3)])
def test_the_exponent_is_found(dtype: torch.dtype, mantissa: int) -> None:
    assert line_of(dtype).mantissa == mantissa


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e8m0fnu, torch.uint64])
def test_types_without_a_sign_bit_are_their_bits(dtype: torch.dtype) -> None:
    assert (line_of(dtype).fold, line_of(dtype).mantissa) == (0, None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.6, 1.0])
def test_torch_operations_yield_the_same_planes(dtype: torch.dtype, level: Level, density: float) -> None:
    draw = np.random.default_rng(7)
    base = random_tensor(dtype, (3, 700), draw)
    assert_same_planes(base, changed_copy(base, density, draw), level)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 20_000])
def test_torch_operations_yield_the_same_planes_of_a_trained_step(count: int) -> None:
    base, target = trained(count, 1e-5, count)
    assert_same_planes(base, target, "small")


def assert_same_planes(base: torch.Tensor, target: torch.Tensor, level: Level) -> None:
    ours = planes_of(bits_of(base), bits_of(target), line_of(base.dtype), level)
    theirs = torch_planes(base, target, level)
    assert ours.edges == theirs.edges
    for one, other in ((ours.totals, theirs.totals), (ours.counts, theirs.counts), (ours.gaps, theirs.gaps)):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(ours.distances, theirs.distances)
    assert ours.distances.dtype == theirs.distances.dtype


def test_planes_of_an_example() -> None:
    old, new = torch.tensor([5, 6, 7, 8], dtype=torch.int8), torch.tensor([5, 7, 7, 6], dtype=torch.int8)
    planes = planes_of(bits_of(old), bits_of(new), line_of(torch.int8), "small")
    assert (planes.totals.tolist(), planes.counts.tolist()) == ([4], [2])
    assert (planes.gaps.tolist(), planes.distances.tolist()) == ([1, 1], [2, 3])


@settings(max_examples=40, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 2**22) | st.integers(0, 40), max_size=60),
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_entropy_coder_carries_any_numbers(gaps: list[int], width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    top = (1 << (8 * width)) - 1
    sizes = draw.integers(0, 8 * width, len(gaps))
    distances = np.array([1 + int(draw.integers(0, 2**63)) % min(top, 1 << int(size)) for size in sizes], f"u{width}")
    if len(gaps):
        distances[0] = top
    ranks, back = through_the_coder(np.array(gaps, np.uint32), distances)
    assert ranks.tolist() == (np.cumsum(np.array(gaps, np.int64) + 1) - 1).tolist()
    np.testing.assert_array_equal(back, distances)


def through_the_coder(gaps: Any, distances: Any) -> tuple[Any, Any]:
    count = len(gaps)
    gap_symbols, distance_symbols = np.empty(count, np.uint8), np.empty(count, np.uint8)
    gap_counts, distance_counts = np.zeros((2, entropy.SYMBOLS), np.int64)
    bits, state = np.zeros(3 * count + 2, np.uint32), np.zeros(3, np.uint64)
    entropy.tokenise(gaps, distances, gap_symbols, distance_symbols, gap_counts, distance_counts, bits, state)
    bits[int(state[0])] = state[1] & np.uint64(0xFFFFFFFF)
    shares = [tables.frequencies(counts + (count == 0)) for counts in (gap_counts, distance_counts)]
    words = np.empty(2 * count + 4, np.uint16)
    ends = np.array([len(words), 1 << 16, 1 << 16], np.uint64)
    gap_table, distance_table = (tables.coder_table(one) for one in shares)
    entropy.encode(gap_symbols, distance_symbols, gap_table, distance_table, words, ends)
    begin = np.array([ends[0], ends[1], ends[2], 0, 0, 0], np.uint64)
    ranks, back = np.empty(count, np.uint32), np.empty_like(distances)
    gap_slots, distance_slots = [tables.slot_table(tables.unpack(tables.pack(one))) for one in shares]
    assert entropy.decode(words, bits, gap_slots, distance_slots, 1 << 31, begin, ranks, back)
    assert begin[:3].tolist() == [len(words), 1 << 16, 1 << 16]
    return ranks, back


def test_frequencies_add_up_and_none_is_lost() -> None:
    draw = np.random.default_rng(3)
    for _ in range(50):
        counts = (draw.random(256) < draw.random()) * draw.integers(0, 10 ** int(draw.integers(1, 7)), 256)
        counts[int(draw.integers(256))] += 1
        shares = tables.frequencies(counts)
        assert int(shares.sum()) == entropy.SCALE
        np.testing.assert_array_equal(shares > 0, counts > 0)
        np.testing.assert_array_equal(tables.unpack(tables.pack(shares)), shares)


def test_a_table_for_all_symbols_can_be_packed() -> None:
    shares = tables.frequencies(np.full(256, 7))
    np.testing.assert_array_equal(tables.unpack(tables.pack(shares)), shares)


@pytest.mark.parametrize("packed", [b"", b"\0", b"\1\2\0\0\0\0", b"\2\1" + b"\xff\3" * 2])
def test_what_is_no_table_is_refused(packed: bytes) -> None:
    with pytest.raises(SyncError):
        tables.unpack(packed)


def test_keys_that_look_alike_share_a_table() -> None:
    counts = np.zeros((tables.KEYS, entropy.SYMBOLS), np.int64)
    counts[4, :8] = 1000
    counts[5, :8] = 990
    counts[60, 20:28] = 1000
    table_of, shares = tables.share_tables(counts)
    assert len(shares) == 2
    assert table_of[4] == table_of[5] != table_of[60]


@pytest.mark.parametrize("count", [0, 1, 64, 100, 1000])
def test_changes_are_counted_as_they_are_found(count: int) -> None:
    draw = np.random.default_rng(count)
    base = draw.integers(0, 4, count).astype(np.uint16)
    target = draw.integers(0, 4, count).astype(np.uint16)
    positions, distances = np.empty(count, np.uint32), np.empty(count, np.uint16)
    found = scan.find_changes(base, target, line_of(torch.bfloat16).arithmetic, positions, distances)
    assert positions[:found].tolist() == np.flatnonzero(base != target).tolist()
    assert scan.count_changes(base, target) == found
