"""The pass over leaves: the digests of the xxhash package, every length, type and alignment, the largest element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.weights.leaf_pass import LINE_BYTES, copy_leaves, digest_leaves
from paceline.weights.tree_digest import LEAF_BYTES, leaf_digests

LEAF = 4096  # a small one, so that runs have several
MASKS = [np.uint8(0x7F), np.uint16(0x7FFF), np.uint32(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0)]
LENGTHS = [0, 8, 64, 240, 248, 256, 264, 320, 1024, 1032, 1088, LEAF, LEAF + 8, LEAF + 64, 3 * LEAF, 3 * LEAF + 1280]


def random_bytes(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def target_of(nbytes: int, shift: int = 0) -> NDArray[np.uint8]:
    """Zeros that begin `shift` bytes behind a line, with one more byte that must stay."""
    room = np.zeros(nbytes + 2 * LINE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % LINE_BYTES + shift
    return room[start : start + nbytes + 1]


def right_digests(data: NDArray[np.uint8], leaf_bytes: int) -> list[bytes]:
    return [
        xxhash.xxh3_128_digest(data[start : start + leaf_bytes].tobytes()) for start in range(0, len(data), leaf_bytes)
    ]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{type(mask).__name__}-{mask:x}")
@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("shift", [0, 8])
def test_bytes_arrive_with_their_digests_and_the_largest_masked_element(
    mask: np.unsignedinteger[Any], nbytes: int, shift: int
) -> None:
    source = random_bytes(nbytes)
    target = target_of(nbytes, shift)
    digests, largest = copy_leaves(target[:nbytes], source, mask, LEAF)
    assert np.array_equal(target[:nbytes], source)
    assert target[nbytes] == 0
    assert digests == right_digests(source, LEAF)
    assert largest == (int((source.view(mask.dtype) & mask).max()) if nbytes else 0)


@given(nbytes=st.integers(0, 3 * LEAF), shift=st.integers(0, 70))
@settings(max_examples=300, deadline=None)
def test_a_run_of_any_length_from_any_place_has_the_digests_of_the_package(nbytes: int, shift: int) -> None:
    source = random_bytes(nbytes + shift)[shift:]
    assert digest_leaves(source, LEAF) == right_digests(source, LEAF)


def test_leaves_of_the_digest_of_weights() -> None:
    source = random_bytes(2 * LEAF_BYTES + 700)
    target = target_of(len(source))
    assert digest_leaves(source) == leaf_digests(source.data)
    assert copy_leaves(target[:-1], source, MASKS[1])[0] == leaf_digests(source.data)


@pytest.mark.parametrize("place", [0, 511, 512, 1023, 2047, 2048, 3839])
def test_one_changed_bit_changes_the_digest_of_its_leaf_alone(place: int) -> None:
    source = random_bytes(LEAF).view(np.uint8)
    before = digest_leaves(source, 2048)
    source[place] ^= 1
    after = digest_leaves(source, 2048)
    assert [a == b for a, b in zip(before, after, strict=True)] == [place >= 2048, place < 2048]


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 500, 512, 1023, 1024])
def test_the_largest_element_is_seen_in_every_lane(place: int) -> None:
    source = np.zeros(1056, dtype=np.uint16)
    source[place] = 0x8001
    target = target_of(source.nbytes)[: source.nbytes]
    assert copy_leaves(target, source.view(np.uint8), np.uint16(0x7FFF))[1] == 1
    assert copy_leaves(target, source.view(np.uint8), np.uint16(0xFFFF))[1] == 0x8001


def test_a_source_on_itself_stays_as_it_is() -> None:
    room = target_of(1 << 12)[: 1 << 12]
    room[:] = np.arange(1 << 12) % 251
    before = room.copy()
    copy_leaves(room, room, np.uint64(0))
    assert np.array_equal(room, before)
