"""One pass over old and new bits: where they differ, and by how much on the number line.

64 elements are compared at once into a mask of 64 bits (LLVM makes of it what the processor has); only set bits cost
time. A class is a range of magnitudes of the *base*, so a receiver, which has the base, can count as the sender does: a
change is told by its rank among the elements of its class. All arrays are one-dimensional and of one unsigned type;
`line` is `NumberLine.arithmetic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation

Bits = NDArray[Any]

_BLOCK = 64
_EXPONENTS = 2048  # float64 has the most
MAX_EDGES = 7  # all are compared at once; bounds that are not used are out of reach
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_NO_RANK = np.int64(1 << 62)
_AHEAD = 24  # changes between asking for a cache line and using it
_BYTES = np.uint64(0x0101010101010101)
_BYTE_TOPS = np.uint64(0x8080808080808080)
_BYTE = np.uint64(0xFF)
_EIGHT = np.uint64(8)
# Entry `byte | rank << 8`: index of the set bit of `byte` that has `rank` set bits below it.
_NTH_IN_BYTE = np.array(
    [([bit for bit in range(8) if byte >> bit & 1] + [0] * 8)[rank] for rank in range(8) for byte in range(256)],
    dtype=np.uint8,
)


def _load_block(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    """64 elements from `start` on as one vector, from any address."""
    data = context.make_array(array_type)(context, builder, array).data
    width = array_type.dtype.bitwidth
    place = builder.gep(data, [start])
    vector = ir.VectorType(ir.IntType(width), _BLOCK)
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=width // 8)


@operation
def _differing(_typing: Any, base: Any, target: Any, start: Any) -> Any:
    """Bit i is set where `base[start + i] != target[start + i]`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        old = _load_block(context, builder, signature.args[0], arguments[0], arguments[2])
        new = _load_block(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", old, new), ir.IntType(_BLOCK))

    return types.uint64(base, target, start), code


@operation
def _reaching(_typing: Any, base: Any, start: Any, magnitude_bits: Any, bounds: Any, masks: Any) -> Any:
    """Bit i of `masks[k + 1]` is set where `base[start + i] & magnitude_bits >= bounds[k]`, for `MAX_EDGES` bounds."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = ir.IntType(signature.args[0].dtype.bitwidth)
        vector = ir.VectorType(element, _BLOCK)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _BLOCK), [0] * _BLOCK)

        def splat(value: Any) -> Any:
            narrow = builder.trunc(value, element) if element.width < 64 else value
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), narrow, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(first, first, lanes)

        def place(argument: int, index: int) -> Any:
            data = context.make_array(signature.args[argument])(context, builder, arguments[argument]).data
            return builder.gep(data, [ir.Constant(ir.IntType(64), index)])

        loaded = _load_block(context, builder, signature.args[0], arguments[0], arguments[1])
        size = builder.and_(loaded, splat(arguments[2]))
        limits = [splat(builder.load(place(3, k))) for k in range(MAX_EDGES)]
        for k, limit in enumerate(limits):
            mask = builder.bitcast(builder.icmp_unsigned(">=", size, limit), ir.IntType(_BLOCK))
            builder.store(mask, place(4, k + 1))
        return context.get_dummy_value()

    return types.void(base, start, types.uint64, bounds, masks), code


@operation
def _lowest(_typing: Any, mask: Any) -> Any:
    """Index of the lowest set bit of a mask that is not 0."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), code


@operation
def _ones(_typing: Any, mask: Any) -> Any:
    """How many bits are set."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), code


@operation
def _fetch(_typing: Any, bits: Any, index: Any) -> Any:
    """Ask for the cache line of an element that will be written."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        insert: Any = cgutils.get_or_insert_function
        builder.call(insert(builder.module, kind, "llvm.prefetch.p0"), [address, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(bits, types.uint64), code


@kernel
def count_changes(base: Bits, target: Bits) -> int:
    """How many elements differ."""
    count = 0
    full = len(base) // _BLOCK
    for block in range(full):
        count += _ones(_differing(base, target, block * _BLOCK))
    for index in range(full * _BLOCK, len(base)):
        count += base[index] != target[index]
    return count


@kernel
def _distance(old: Any, new: Any, line: Any) -> Any:
    """Zigzag distance of two elements on the number line (see `number_line`)."""
    fold, top, every = line
    a = np.uint64(old)
    b = np.uint64(new)
    a ^= (_ZERO - (a >> top)) & fold
    b ^= (_ZERO - (b >> top)) & fold
    d = (b - a) & every
    return ((d << _ONE) ^ (_ZERO - (d >> top))) & every


@kernel
def find_changes(base: Bits, target: Bits, line: Any, positions: NDArray[np.uint32], distances: Bits) -> int:
    """Fill `positions` and zigzag `distances` (both as long as `base`) in rising order; returns how many there are."""
    count = 0
    full = len(base) // _BLOCK
    for block in range(full):
        start = block * _BLOCK
        mask = _differing(base, target, start)
        while mask != _ZERO:
            index = start + _lowest(mask)
            positions[count] = index
            distances[count] = _distance(base[index], target[index], line)
            count += 1
            mask &= mask - _ONE
    for index in range(full * _BLOCK, len(base)):
        if base[index] != target[index]:
            positions[count] = index
            distances[count] = _distance(base[index], target[index], line)
            count += 1
    return count


@kernel
def _short_masks(base: Bits, start: int, bounds: NDArray[np.uint64], magnitude: Any, masks: NDArray[np.uint64]) -> None:
    """What `_reaching` does, for the fewer than 64 elements at the end, one by one; `masks[0]` is which there are."""
    left = len(base) - start
    masks[0] = (_ONE << np.uint64(left)) - _ONE
    for k in range(len(bounds)):
        mask = _ZERO
        for index in range(left):
            if np.uint64(base[start + index]) & magnitude >= bounds[k]:
                mask |= _ONE << np.uint64(index)
        masks[k + 1] = mask


@kernel
def rank_changes(
    base: Bits,
    bounds: NDArray[np.uint64],
    magnitude: Any,
    mantissa: Any,
    positions: NDArray[np.uint32],
    classes: NDArray[np.uint8],
    ranks: NDArray[np.uint32],
    totals: NDArray[np.int64],
) -> None:
    """Fill class and rank within the class for each position, and how many elements each class has.

    Class k holds the elements whose magnitude reaches `bounds[k - 1]` but not `bounds[k]` (rising; the lower `mantissa`
    bits are zero).
    """
    top = len(bounds) + 1
    class_of = np.zeros(_EXPONENTS, np.uint8)
    for bound in bounds:
        class_of[bound >> mantissa :] += np.uint8(1)
    before = np.zeros(top + 1, np.int64)
    masks = np.zeros(MAX_EDGES + 2, np.uint64)
    masks[0] = _ALL
    limits = np.full(MAX_EDGES, _ALL, np.uint64)
    limits[: len(bounds)] = bounds
    cursor = 0
    for start in range(0, len(base), _BLOCK):
        if start + _BLOCK <= len(base):
            _reaching(base, start, magnitude, limits, masks)
        else:
            _short_masks(base, start, limits, magnitude, masks)
        while cursor < len(positions) and positions[cursor] < start + _BLOCK:
            bit = np.uint64(positions[cursor] - start)
            own = class_of[(np.uint64(base[positions[cursor]]) & magnitude) >> mantissa]
            low = (_ONE << bit) - _ONE
            higher = before[own + 1] + _ones(masks[own + 1] & low)
            classes[cursor] = own
            ranks[cursor] = before[own] + _ones(masks[own] & low) - higher
            cursor += 1
        for k in range(top):
            before[k] += _ones(masks[k])
    for k in range(top):
        totals[k] = before[k] - before[k + 1]


@kernel
def split_classes(
    classes: NDArray[np.uint8],
    ranks: NDArray[np.uint32],
    distances: Bits,
    counts: NDArray[np.int64],
    gaps: NDArray[np.uint32],
    split: Bits,
) -> None:
    """Fill gaps between ranks, and distances, class after class; `counts` tells how many changes each class has."""
    place = np.zeros(len(counts), np.int64)
    last = np.full(len(counts), -1, np.int64)
    for index in range(len(ranks)):
        counts[classes[index]] += 1
    for k in range(1, len(counts)):
        place[k] = place[k - 1] + counts[k - 1]
    for index in range(len(ranks)):
        own = classes[index]
        rank = np.int64(ranks[index])
        gaps[place[own]] = rank - last[own] - 1
        split[place[own]] = distances[index]
        last[own] = rank
        place[own] += 1


@kernel
def gaps_between(positions: NDArray[np.uint32], gaps: NDArray[np.uint32]) -> None:
    """Fill how many unchanged elements stand before each position, counted from the one before."""
    last = np.int64(-1)
    for index in range(len(positions)):
        position = np.int64(positions[index])
        gaps[index] = position - last - 1
        last = position


@kernel
def _nth(mask: Any, rank: Any) -> Any:
    """Index of the set bit that has `rank` set bits below it (Vigna, broadword select, 2008)."""
    sums = mask - ((mask >> _ONE) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _BYTES
    place = np.uint64(_ones((((rank * _BYTES) | _BYTE_TOPS) - sums) & _BYTE_TOPS)) * _EIGHT
    left = rank - (((sums << _EIGHT) >> place) & _BYTE)
    return place + np.uint64(_NTH_IN_BYTE[((mask >> place) & _BYTE) | (left << _EIGHT)])


@kernel
def place_changes(
    base: Bits,
    bounds: NDArray[np.uint64],
    magnitude: Any,
    counts: NDArray[np.int64],
    ranks: NDArray[np.uint32],
    distances: Bits,
    positions: NDArray[np.uint32],
    ordered: Bits,
) -> int:
    """Inverse of rank and split: fill positions and distances block after block; returns how many found a place."""
    top = len(bounds) + 1
    masks = np.zeros(MAX_EDGES + 2, np.uint64)
    masks[0] = _ALL
    limits = np.full(MAX_EDGES, _ALL, np.uint64)
    limits[: len(bounds)] = bounds
    seen = np.zeros(top, np.int64)
    following = np.full(top, _NO_RANK, np.int64)
    cursor = np.zeros(top, np.int64)
    end = np.cumsum(counts)
    for k in range(top):
        cursor[k] = end[k] - counts[k]
        if counts[k] > 0:
            following[k] = ranks[cursor[k]]
    placed = 0
    for start in range(0, len(base), _BLOCK):
        if start + _BLOCK <= len(base):
            _reaching(base, start, magnitude, limits, masks)
        else:
            _short_masks(base, start, limits, magnitude, masks)
        for k in range(top):
            own = masks[k] & ~masks[k + 1]
            reach = seen[k] + _ones(own)
            while following[k] < reach:
                positions[placed] = start + _nth(own, np.uint64(following[k] - seen[k]))
                ordered[placed] = distances[cursor[k]]
                placed += 1
                cursor[k] += 1
                following[k] = np.int64(ranks[cursor[k]]) if cursor[k] < end[k] else _NO_RANK
            seen[k] = reach
    return placed


@kernel
def shift(bits: Bits, positions: NDArray[np.uint32], distances: Bits, line: Any) -> None:
    """Move each element along the number line by its distance."""
    fold, top, every = line
    for index in range(len(positions)):
        _fetch(bits, positions[min(index + _AHEAD, len(positions) - 1)])
        place = positions[index]
        value = np.uint64(bits[place])
        zigzag = np.uint64(distances[index])
        distance = (zigzag >> _ONE) ^ (_ZERO - (zigzag & _ONE))
        value ^= (_ZERO - (value >> top)) & fold
        value = (value + distance) & every
        bits[place] = value ^ ((_ZERO - (value >> top)) & fold)


@kernel
def patterns_of(bits: Bits, positions: NDArray[np.uint32], distances: Bits, line: Any) -> None:
    """Put in the place of each distance the bits that it inverts in `bits`, which are only read."""
    fold, top, every = line
    for index in range(len(positions)):
        _fetch(bits, positions[min(index + _AHEAD, len(positions) - 1)])
        old = np.uint64(bits[positions[index]])
        zigzag = np.uint64(distances[index])
        distance = (zigzag >> _ONE) ^ (_ZERO - (zigzag & _ONE))
        value = ((old ^ ((_ZERO - (old >> top)) & fold)) + distance) & every
        distances[index] = (value ^ ((_ZERO - (value >> top)) & fold)) ^ old


@kernel
def flip_at(bits: Bits, positions: NDArray[np.uint32], patterns: Bits, done: NDArray[np.uint8], mark: int) -> None:
    """Invert the bits of each pattern at its position: applied twice, nothing has changed.

    The last act is to turn over `done[mark]`: no signal of the interpreter comes between the work and its record.
    """
    for index in range(len(positions)):
        bits[positions[index]] ^= patterns[index]
    done[mark] ^= np.uint8(1)


@kernel
def flip(bits: Bits, pattern: Bits, done: NDArray[np.uint8], mark: int) -> None:
    """Invert bits: applied twice, nothing has changed. Turns over `done[mark]` last."""
    for index in range(len(bits)):
        bits[index] ^= pattern[index]
    done[mark] ^= np.uint8(1)
