"""The copy past the caches: every length and type, the largest element, targets that are not aligned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.weights.stream_copy import LINE_BYTES, stream_copy

MASKS = [np.uint8(0x7F), np.uint16(0x7FFF), np.uint32(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0)]


def aligned_target(nbytes: int, shift: int = 0) -> NDArray[np.uint8]:
    """Zeros that begin `shift` bytes behind a line, with one more byte that must stay."""
    room = torch.zeros(nbytes + 2 * LINE_BYTES, dtype=torch.uint8).numpy()
    start = -room.ctypes.data % LINE_BYTES + shift
    return room[start : start + nbytes + 1]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{type(mask).__name__}-{mask:x}")
@pytest.mark.parametrize("nbytes", [0, 8, 248, 256, 264, 4096, (1 << 16) + 8])
@pytest.mark.parametrize("shift", [0, 8])
def test_bytes_arrive_and_the_largest_masked_element_is_told(
    mask: np.unsignedinteger[np.typing.NBitBase], nbytes: int, shift: int
) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    target = aligned_target(nbytes, shift)
    largest = stream_copy(target[:nbytes], source, mask)
    assert np.array_equal(target[:nbytes], source)
    assert target[nbytes] == 0
    assert largest == (int((source.view(mask.dtype) & mask).max()) if nbytes else 0)


@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, 1000, 1023, 1024])
def test_the_largest_element_is_seen_in_every_lane(place: int) -> None:
    source = np.zeros(1025, dtype=np.uint16)
    source[place] = 0x8001
    target = aligned_target(source.nbytes)
    assert stream_copy(target[: source.nbytes], source.view(np.uint8), np.uint16(0x7FFF)) == 1
    assert stream_copy(target[: source.nbytes], source.view(np.uint8), np.uint16(0xFFFF)) == 0x8001


def test_a_source_on_itself_stays_as_it_is() -> None:
    room = aligned_target(1 << 12)[: 1 << 12]
    room[:] = np.arange(1 << 12) % 251
    before = room.copy()
    stream_copy(room, room, np.uint64(0))
    assert np.array_equal(room, before)
