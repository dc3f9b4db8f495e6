"""Entropy coding of gaps and distances: a number is a symbol plus plain bits, symbols are coded by rANS.

Symbols: 0..15 stand for themselves; above, each octave has four symbols, and the rest of the number is written as it is
(within a quarter of an octave it is nearly uniform). rANS (Duda, arXiv:1311.2540): a state of 32 bits, 16-bit words,
frequencies that add up to 2^11, one state for gaps and one for distances so that a processor works on both at once. The
encoder goes backwards, the decoder forwards. A decoder that reads past an end, or does not end where the encoder began,
has been handed something else than an encoder wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation

SYMBOLS = 256
SCALE_BITS = 11
SCALE = 1 << SCALE_BITS
EXTRA_WORDS = 3  # plain bits of one change fit into this many 32-bit words

_DIRECT = np.uint64(16)
_LOW = np.uint64(1 << 16)  # a state lies between this and 2^32
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_TWO = np.uint64(2)
_THREE = np.uint64(3)
_SHIFT = np.uint64(SCALE_BITS)
_SLOT = np.uint64(SCALE - 1)
_ROOM = np.uint64(32 - SCALE_BITS)
_WORD = np.uint64(16)
_HALF = np.uint64(32)
_HALF_MASK = np.uint64(0xFFFFFFFF)
_BYTE = np.uint64(0xFF)
_TWELVE = np.uint64(0xFFF)
_EIGHT = np.uint64(8)
_TWENTY = np.uint64(20)


@operation
def _log2(_typing: Any, value: Any) -> Any:
    """Floor of the logarithm of a number that is not 0."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.uint64(types.uint64), code


@kernel
def tokenise(
    gaps: NDArray[np.uint32],
    distances: NDArray[Any],
    gap_symbols: NDArray[np.uint8],
    distance_symbols: NDArray[np.uint8],
    gap_counts: NDArray[np.int64],
    distance_counts: NDArray[np.int64],
    bits: NDArray[np.uint32],
    state: NDArray[np.uint64],
) -> None:
    """Fill symbols, add to their counts, append plain bits; `state` is (word index, bits held, how many are held)."""
    word, held, have = state[0], state[1], state[2]
    for index in range(len(gaps)):
        for turn in range(2):
            value = np.uint64(gaps[index]) if turn == 0 else np.uint64(distances[index]) - _ONE
            if value < _DIRECT:
                symbol = value
            else:
                size = _log2(value) - _TWO
                symbol = _DIRECT + ((size - _TWO) << _TWO) + ((value >> size) & _THREE)
                rest = value & ((_ONE << size) - _ONE)
                if size > _HALF:
                    held |= (rest & _HALF_MASK) << have
                    bits[word] = held & _HALF_MASK
                    word += _ONE
                    held >>= _HALF
                    rest >>= _HALF
                    size -= _HALF
                held |= rest << have
                have += size
                if have >= _HALF:
                    bits[word] = held & _HALF_MASK
                    word += _ONE
                    held >>= _HALF
                    have -= _HALF
            if turn == 0:
                gap_symbols[index] = symbol
                gap_counts[symbol] += 1
            else:
                distance_symbols[index] = symbol
                distance_counts[symbol] += 1
    state[0], state[1], state[2] = word, held, have


@kernel
def encode(
    gap_symbols: NDArray[np.uint8],
    distance_symbols: NDArray[np.uint8],
    gap_table: NDArray[np.uint32],
    distance_table: NDArray[np.uint32],
    words: NDArray[np.uint16],
    state: NDArray[np.uint64],
) -> None:
    """Backwards; words are filled from the end of `words`. `state` is (words free, gap state, distance state).

    A table has, per symbol, its frequency in the lower 16 bits and the sum of those before it in the upper 16.
    """
    free, gap_state, distance_state = state[0], state[1], state[2]
    for step in range(len(gap_symbols)):
        index = len(gap_symbols) - 1 - step
        entry = np.uint64(distance_table[distance_symbols[index]])
        share = entry & np.uint64(0xFFFF)
        if distance_state >= share << _ROOM:
            free -= _ONE
            words[free] = distance_state & np.uint64(0xFFFF)
            distance_state >>= _WORD
        quotient = np.uint32(distance_state) // np.uint32(share)
        distance_state = (np.uint64(quotient) << _SHIFT) + (distance_state - quotient * share) + (entry >> _WORD)
        entry = np.uint64(gap_table[gap_symbols[index]])
        share = entry & np.uint64(0xFFFF)
        if gap_state >= share << _ROOM:
            free -= _ONE
            words[free] = gap_state & np.uint64(0xFFFF)
            gap_state >>= _WORD
        quotient = np.uint32(gap_state) // np.uint32(share)
        gap_state = (np.uint64(quotient) << _SHIFT) + (gap_state - quotient * share) + (entry >> _WORD)
    state[0], state[1], state[2] = free, gap_state, distance_state


@kernel
def slots(frequencies: NDArray[np.uint16], table: NDArray[np.uint32]) -> None:
    """Fill the decoder's table: per slot its symbol (8 bits), frequency (12) and place within the symbol (12)."""
    slot = 0
    for symbol in range(len(frequencies)):
        share = np.uint32(frequencies[symbol])
        for inner in range(share):
            table[slot] = np.uint32(symbol) | (share << np.uint32(8)) | (np.uint32(inner) << np.uint32(20))
            slot += 1


@kernel
def _take(bits: NDArray[np.uint32], size: Any, plain: Any, held: Any, have: Any) -> Any:
    """The next `size` plain bits, and the reader's place; a place past the end says that there were not as many."""
    rest = _ZERO
    done = _ZERO
    while done < size:
        part = min(size - done, _HALF)
        if have < part:
            held |= (np.uint64(bits[plain]) if plain < np.uint64(len(bits)) else _ZERO) << have
            plain += _ONE
            have += _HALF
        rest |= (held & ((_ONE << part) - _ONE)) << done
        held >>= part
        have -= part
        done += part
    return rest, plain, held, have


@kernel
def decode(
    words: NDArray[np.uint16],
    bits: NDArray[np.uint32],
    gap_slots: NDArray[np.uint32],
    distance_slots: NDArray[np.uint32],
    limit: int,
    state: NDArray[np.uint64],
    ranks: NDArray[np.uint32],
    distances: NDArray[Any],
) -> bool:
    """Fill ranks (below `limit`) and zigzag distances of one class; False where the input is no encoder's.

    `state` is (word index, gap state, distance state, index of the 32-bit word, bits held, how many are held).
    """
    word, gap_state, distance_state = state[0], state[1], state[2]
    plain, held, have = state[3], state[4], state[5]
    words_end, plain_end = np.uint64(len(words)), np.uint64(len(bits))
    every = _ALL >> np.uint64(64 - 8 * distances.itemsize)
    used = _ZERO
    for index in range(len(ranks)):
        value = _ZERO
        for turn in range(2):
            now = gap_state if turn == 0 else distance_state
            entry = np.uint64(gap_slots[now & _SLOT] if turn == 0 else distance_slots[now & _SLOT])
            now = ((entry >> _EIGHT) & _TWELVE) * (now >> _SHIFT) + (entry >> _TWENTY)
            if now < _LOW:
                if word >= words_end:
                    return False
                now = (now << _WORD) | np.uint64(words[word])
                word += _ONE
            value = entry & _BYTE
            if value >= _DIRECT:
                size = ((value - _DIRECT) >> _TWO) + _TWO
                lead = (np.uint64(4) + ((value - _DIRECT) & _THREE)) << size
                rest, plain, held, have = _take(bits, size, plain, held, have)
                if plain > plain_end:
                    return False
                value = lead + rest
            if turn == 0:
                gap_state = now
                if value >= np.uint64(limit) - used:
                    return False
                used += value + _ONE
                ranks[index] = used - _ONE
            else:
                distance_state = now
                if value >= every:
                    return False
                distances[index] = value + _ONE
    state[0], state[1], state[2] = word, gap_state, distance_state
    state[3], state[4], state[5] = plain, held, have
    return True
