"""Frequency tables: classes that look alike share one, and tables travel in the header.

Every class of every run of elements has a key for its gaps (how rare changes are) and one for its distances (how long
they are), both in half octaves. Symbols are counted per key; neighbouring keys then share a table as long as the bytes
of a further table are more than it saves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SyncError
from paceline.weights.delta.entropy import SCALE, SYMBOLS, slots

KEYS = 160
_TABLE_BITS = 24.0
_SYMBOL_BITS = 14.0

Counts = NDArray[np.int64]


def key_of(ratio: float) -> int:
    """Half octaves of a ratio of at least 1."""
    return min(KEYS - 1, max(0, round(2 * math.log2(max(1.0, ratio)))))


def share_tables(counts: Counts) -> tuple[NDArray[np.uint8], list[NDArray[np.uint16]]]:
    """From symbol counts, shape `[KEYS, SYMBOLS]`: which table each key uses, and the tables' frequencies."""
    groups = [[int(key)] for key in np.flatnonzero(counts.sum(axis=1))]
    sums = [counts[group[0]].copy() for group in groups]
    costs = [_cost(total) for total in sums]
    joined = [_cost(sums[i] + sums[i + 1]) for i in range(len(sums) - 1)]
    while joined:
        gains = [costs[i] + costs[i + 1] - joined[i] for i in range(len(joined))]
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            break
        groups[best] += groups.pop(best + 1)
        sums[best] = sums[best] + sums.pop(best + 1)
        costs[best] = joined[best]
        costs.pop(best + 1)
        joined.pop(best)
        for i in (best - 1, best):
            if 0 <= i < len(joined):
                joined[i] = _cost(sums[i] + sums[i + 1])
    table_of = np.zeros(KEYS, np.uint8)
    for index, group in enumerate(groups):
        table_of[group] = index
    return table_of, [frequencies(total) for total in sums]


def frequencies(counts: Counts) -> NDArray[np.uint16]:
    """Counts scaled to add up to `SCALE`, at least 1 where a symbol occurs."""
    total = int(counts.sum())
    scaled = np.where(counts > 0, np.maximum(1, counts * SCALE // total), 0)
    missing = SCALE - int(scaled.sum())
    while missing != 0:
        largest = int(np.argmax(scaled))
        change = max(missing, 1 - int(scaled[largest]) // 2) if missing < 0 else missing
        scaled[largest] += change
        missing -= change
    return scaled.astype(np.uint16)


def coder_table(shares: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """What `entropy.encode` takes: frequency, and above it the sum of those before."""
    before = np.cumsum(shares, dtype=np.uint32) - shares
    return (before << np.uint32(16)) | shares


def slot_table(shares: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """What `entropy.decode` takes."""
    table = np.empty(SCALE, np.uint32)
    slots(shares, table)
    return table


def pack(shares: NDArray[np.uint16]) -> bytes:
    """Symbols that occur, rising, one byte each, then their frequencies less 1, two bytes each."""
    symbols = np.flatnonzero(shares)
    return symbols.astype(np.uint8).tobytes() + (shares[symbols] - 1).astype("<u2").tobytes()


def unpack(packed: bytes) -> NDArray[np.uint16]:
    """Inverse of `pack`.

    Raises:
        SyncError: not a table: lengths, order or sum are wrong.
    """
    count, rest = divmod(len(packed), 3)
    symbols = np.frombuffer(packed, np.uint8, count).astype(np.int64)
    shares = np.frombuffer(packed, "<u2", count, offset=count).astype(np.int64) + 1
    if rest or not 0 < count <= SYMBOLS or np.any(np.diff(symbols) <= 0) or int(shares.sum()) != SCALE:
        raise SyncError("the delta has a frequency table that no encoder writes")
    table = np.zeros(SYMBOLS, np.uint16)
    table[symbols] = shares
    return table


def _cost(counts: Counts) -> float:
    used = counts[counts > 0].astype(np.float64)
    return float((used * np.log2(used.sum() / used)).sum()) + _TABLE_BITS + _SYMBOL_BITS * len(used)
