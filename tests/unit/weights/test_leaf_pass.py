"""The pass over leaves: the digests of the xxhash package, every length, type and alignment, the largest element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.weights.leaf_pass import LINE_BYTES, LeafRuns, as_bytes, digest_runs
from paceline.weights.leaf_runs import address_of, copy_leaves, digest_leaves, fill_leaves
from paceline.weights.tree_digest import LEAF_BYTES

MASKS = [np.uint8(0x7F), np.uint16(0x7FFF), np.uint32(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0)]
LENGTHS = [0, 8, 64, 240, 248, 256, 264, 320, 1024, 1032, 1088, 4096, LEAF_BYTES + 64, 2 * LEAF_BYTES + 1288]


def random_bytes(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def target_of(nbytes: int, shift: int = 0) -> NDArray[np.uint8]:
    """Zeros that begin `shift` bytes behind a line, with one more byte that must stay."""
    room = np.zeros(nbytes + 2 * LINE_BYTES, dtype=np.uint8)
    start = -address_of(room) % LINE_BYTES + shift
    return room[start : start + nbytes + 1]


def right_digests(data: NDArray[np.uint8], leaf_bytes: int = LEAF_BYTES) -> bytes:
    leaves = (data[start : start + leaf_bytes] for start in range(0, len(data), leaf_bytes))
    return b"".join(xxhash.xxh3_128_digest(leaf.tobytes()) for leaf in leaves)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{type(mask).__name__}-{mask:x}")
@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("shift", [0, 8])
def test_bytes_arrive_with_their_digests_and_the_largest_masked_element(
    mask: np.unsignedinteger[Any], nbytes: int, shift: int
) -> None:
    source = random_bytes(nbytes)
    target = target_of(nbytes, shift)
    ((digests, largest),) = copy_leaves([(source, target[:nbytes])], mask)
    assert np.array_equal(target[:nbytes], source)
    assert target[nbytes] == 0
    assert digests == right_digests(source)
    assert largest == (int((source.view(mask.dtype) & mask).max()) if nbytes else 0)


@given(nbytes=st.integers(256, 3 * 4096), shift=st.integers(0, 70))
@settings(max_examples=300, deadline=None)
def test_a_leaf_of_any_length_from_any_place_has_the_digest_of_the_package(nbytes: int, shift: int) -> None:
    source = random_bytes(nbytes + shift)[shift:]
    one = (np.array([value], np.int64) for value in (address_of(source), nbytes, 0))
    digests = np.empty((1, 2), np.uint64)
    digest_runs(LeafRuns(*one), digests)
    assert as_bytes(digests) == right_digests(source)


@given(
    lengths=st.lists(st.sampled_from([*LENGTHS, 9 * LEAF_BYTES, 40 * LEAF_BYTES]), max_size=6),
    threads=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_many_parts_with_any_number_of_threads(lengths: list[int], threads: int) -> None:
    parts = [random_bytes(length) for length in lengths]
    targets = [target_of(length)[:length] for length in lengths]
    right = [right_digests(part) for part in parts]
    assert digest_leaves(parts, threads) == right
    copied = copy_leaves(list(zip(parts, targets, strict=True)), np.uint16(0x7FFF), threads)
    assert [digests for digests, _ in copied] == right
    elements = [part.view(np.uint16) & np.uint16(0x7FFF) for part in parts]
    assert [largest for _, largest in copied] == [int(found.max(initial=0)) for found in elements]
    assert all(np.array_equal(part, target) for part, target in zip(parts, targets, strict=True))


@pytest.mark.parametrize("place", [0, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES - 1])
def test_one_changed_bit_changes_the_digest_of_its_leaf_alone(place: int) -> None:
    source = random_bytes(2 * LEAF_BYTES)
    (before,) = digest_leaves([source])
    source[place] ^= 1
    (after,) = digest_leaves([source])
    in_first = place < LEAF_BYTES
    assert (before[:16] == after[:16], before[16:] == after[16:]) == (not in_first, in_first)


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 500, 512, 1023, 1024])
def test_the_largest_element_is_seen_in_every_lane(place: int) -> None:
    source = np.zeros(1056, dtype=np.uint16)
    source[place] = 0x8001
    pair = (source.view(np.uint8), target_of(source.nbytes)[: source.nbytes])
    assert copy_leaves([pair], np.uint16(0x7FFF))[0][1] == 1
    assert copy_leaves([pair], np.uint16(0xFFFF))[0][1] == 0x8001


def test_a_source_on_itself_stays_as_it_is() -> None:
    room = target_of(1 << 12)[: 1 << 12]
    room[:] = np.arange(1 << 12) % 251
    before = room.copy()
    copy_leaves([(room, room)], np.uint64(0))
    assert np.array_equal(room, before)


@pytest.mark.parametrize("nbytes", [*LENGTHS, 255, 257, 1023, 1025, 5 * 1024 + 3, LEAF_BYTES - 1, LEAF_BYTES + 1])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_a_fill_brings_every_byte_and_no_more_and_gives_the_digests_of_what_is_there(nbytes: int, shift: int) -> None:
    source = random_bytes(nbytes + shift)[shift:]
    target = target_of(nbytes, shift)
    assert fill_leaves([(source, target[:nbytes])]) == [right_digests(source)]
    assert np.array_equal(target[:nbytes], source)
    assert target[nbytes] == 0


@given(
    lengths=st.lists(st.sampled_from([0, 1, 300, 4096, LEAF_BYTES, 5 * LEAF_BYTES + 1500]), max_size=6),
    threads=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_many_fills_with_any_number_of_threads(lengths: list[int], threads: int) -> None:
    sources = [random_bytes(nbytes) for nbytes in lengths]
    targets = [np.zeros(nbytes, np.uint8) for nbytes in lengths]
    found = fill_leaves(list(zip(sources, targets, strict=True)), threads)
    assert found == [right_digests(source) for source in sources]
    assert all(np.array_equal(source, target) for source, target in zip(sources, targets, strict=True))


class Copies:
    """Says where another copy is, at each turn, and notes where this one came."""

    def __init__(self, *elsewhere: int | None) -> None:
        self.elsewhere = list(elsewhere)
        self.told: list[int] = []

    def place(self) -> int | None:
        return self.elsewhere.pop(0) if self.elsewhere else None

    def tell(self, place: int) -> None:
        self.told.append(place)


@pytest.mark.parametrize(
    ("elsewhere", "places"),
    [
        ((), [0, 1, 2, 3, 4]),
        ((2,), [2, 3, 4, 0, 1]),
        ((None, 3, 3), [0, 3, 4, 1, 2]),
        ((1, 4, 4, 2), [1, 4, 0, 2, 3]),
        ((4, 0, 0, 0, 0), [4, 0, 1, 2, 3]),
        ((-1, 5, 1 << 40), [0, 1, 2, 3, 4]),
    ],
)
def test_a_fill_goes_where_another_is_and_brings_every_byte_all_the_same(
    elsewhere: tuple[int | None, ...], places: list[int]
) -> None:
    sources = [random_bytes(nbytes) for nbytes in (6 * LEAF_BYTES + 77, 0, 300, 4 * LEAF_BYTES)]
    targets = [np.zeros(len(source), np.uint8) for source in sources]
    copies = Copies(*elsewhere)
    found = fill_leaves(list(zip(sources, targets, strict=True)), copies=copies)
    assert found == [right_digests(source) for source in sources]
    assert all(np.array_equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert copies.told == places


def test_a_fill_of_nothing_asks_nobody() -> None:
    assert fill_leaves([], copies=Copies(3)) == []


@pytest.mark.parametrize("nbytes", [300, 4096, 9000, LEAF_BYTES])
def test_a_fill_hashes_the_target_and_not_what_was_to_be_written(nbytes: int) -> None:
    # The target overlaps its source, so other bytes arrive than the source had at first.
    room = random_bytes(nbytes + 640)
    before = right_digests(room[:nbytes])
    (found,) = fill_leaves([(room[:nbytes], room[640:])])
    assert found == right_digests(room[640:])
    assert (found == before) == (nbytes <= 640)
