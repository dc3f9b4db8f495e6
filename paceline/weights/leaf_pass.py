"""One pass over the bytes of whole leaves: their digests, on the way a copy and a look for NaN and infinity.

The digest is XXH3-128 of the xxHash specification (Y. Collet), with its default secret and seed 0: what the xxhash
package gives for a leaf. Made here because a capture is bound by memory: each line is loaded once, hashed, looked at,
and stored past the caches (a store of a whole line with that hint spares the read of what it overwrites, a third of a
copy's traffic). Runs of leaves come by address, many in one call that holds no interpreter lock, so threads do not wait
for each other. LLVM turns the vectors and the hint into what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation
from paceline.weights.tree_digest import LEAF_BYTES

LINE_BYTES = 64
LEAST_BYTES = 256  # of a leaf; XXH3 treats inputs of up to 240 bytes in other ways

_BLOCK_LINES = 16
_BLOCK_BYTES = _BLOCK_LINES * LINE_BYTES
_AHEAD_BLOCKS = 4  # copied before they are hashed
_READ_ONCE, _READ_BY_OTHERS = 0, 3  # whether a line is worth a place in the larger caches
_PREFETCH_BYTES = 1024  # how far ahead of a copy its source is asked for: stores keep the processor from doing it
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME_64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME_32[2], *_PRIME_64[:4], _PRIME_32[1], _PRIME_64[4], _PRIME_32[0])
_AVALANCHE = 0x165667919E3779F9

_WORD = ir.IntType(64)
_STRIPE = ir.VectorType(_WORD, 8)


class LeafRuns(NamedTuple):
    """Runs of whole leaves: where each begins, its bytes (at least `LEAST_BYTES` in its last leaf), and the number of
    its first leaf among all. Who calls keeps the memory alive. Arrays of int64, [runs].
    """

    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    firsts: NDArray[np.int64]

    def part(self, begin: int, end: int) -> LeafRuns:
        """The runs from `begin` to before `end`."""
        return LeafRuns(self.sources[begin:end], self.lengths[begin:end], self.firsts[begin:end])


def digest_runs(runs: LeafRuns, digests: NDArray[np.uint64], leaf_bytes: int = LEAF_BYTES) -> None:
    """Write each leaf's digest, [leaves, 2]: the high word, then the low one."""
    _digest_each(runs.sources, runs.lengths, runs.firsts, leaf_bytes, digests)


def copy_runs(
    runs: LeafRuns,
    targets: NDArray[np.int64],
    mask: np.unsignedinteger[Any],
    digests: NDArray[np.uint64],
    largest: NDArray[np.uint64],
    leaf_bytes: int = LEAF_BYTES,
) -> None:
    """Copy each run to its target too, and write the largest `element & mask` of each run's source, [runs].

    Targets and lengths are multiples of `LINE_BYTES`, as `leaf_bytes` is. Elements are unsigned, of the mask's type, in
    the machine's order.
    """
    _copy_each(runs.sources, targets, runs.lengths, runs.firsts, leaf_bytes, mask, digests, largest)


def fill_runs(
    runs: LeafRuns, targets: NDArray[np.int64], digests: NDArray[np.uint64], leaf_bytes: int = LEAF_BYTES
) -> None:
    """Copy each run to its target, leaf by leaf, and write the digest of what is then read there, [leaves, 2].

    A leaf is read again while the caches still have it, so memory is not asked twice.
    """
    _fill_each(runs.sources, targets, runs.lengths, runs.firsts, leaf_bytes, digests)


def as_bytes(digests: NDArray[np.uint64]) -> bytes:
    """The digests one after another, 16 bytes each."""
    return digests.astype(">u8").tobytes()


@operation
def _digest_leaf(_typing: Any, source: Any, length: Any, digests: Any, place: Any) -> Any:
    """Write the digest of `length` bytes at the address `source`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out = _data_of(context, builder, signature, arguments, 2)
        _hash(builder, _pointer(builder, arguments[0]), arguments[1], _unseen, out, arguments[3])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, digests, types.int64), code


@operation
def _copy_leaf(_typing: Any, source: Any, target: Any, length: Any, mask: Any, digests: Any, place: Any) -> Any:
    """The same; stores each line from the address `target` on, and gives the largest masked element."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, to = _pointer(builder, arguments[0]), _pointer(builder, arguments[1])
        element = ir.IntType(signature.args[3].bitwidth)
        line = ir.VectorType(element, 8 * LINE_BYTES // element.width)
        masks = _splat(builder, line, arguments[3])
        allocate: Any = cgutils.alloca_once_value
        largest = allocate(builder, ir.Constant(line, [0] * line.count))
        past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        def store(offset: Any, values: Any) -> None:
            _prefetch(builder, builder.gep(start, [offset]), _READ_ONCE)
            there = builder.bitcast(builder.gep(to, [offset]), _STRIPE.as_pointer())
            stored = builder.store(values, there, align=LINE_BYTES)
            stored.set_metadata("nontemporal", past_the_cache)
            seen, before = builder.and_(builder.bitcast(values, line), masks), builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", seen, before), seen, before), largest)

        out = _data_of(context, builder, signature, arguments, 4)
        _hash(builder, start, arguments[2], store, out, arguments[5])
        return _largest_lane(builder, line, builder.load(largest))

    return types.uint64(types.int64, types.int64, types.int64, mask, digests, types.int64), code


@operation
def _fill_leaf(_typing: Any, source: Any, target: Any, length: Any, digests: Any, place: Any) -> Any:
    """Copy `length` bytes from the address `source` to the address `target`, and write the digest of what is there.

    The copy runs `_AHEAD_BLOCKS` ahead of the hash: what is hashed is read from the target, out of the nearest cache.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, to, length = _pointer(builder, arguments[0]), _pointer(builder, arguments[1]), arguments[2]
        move: Any = cgutils.raw_memcpy

        def move_block(offset: Any) -> None:
            rest = builder.sub(length, offset)
            there, here = builder.gep(to, [offset]), builder.gep(start, [offset])
            with builder.if_else(builder.icmp_signed(">=", rest, _word(_BLOCK_BYTES))) as (whole, partly):
                with whole:
                    _move_lines(builder, here, there)
                with partly, builder.if_then(builder.icmp_signed(">", rest, _word(0))):
                    move(builder, there, here, rest, 1)

        for number in range(_AHEAD_BLOCKS):
            move_block(_word(number * _BLOCK_BYTES))
        out = _data_of(context, builder, signature, arguments, 3)

        def ahead(first: Any) -> None:
            move_block(builder.add(first, _word(_AHEAD_BLOCKS * _BLOCK_BYTES)))

        _hash(builder, to, length, _unseen, out, arguments[4], ahead)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, digests, types.int64), code


@operation
def _finish_stores(_typing: Any) -> Any:
    """What is stored is stored: loads that follow are not made from what is known to have been written, and stores past
    the cache, which are not ordered with later ones, are found by whoever is told that the copy is done.
    """

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@kernel
def _digest_each(
    sources: NDArray[np.int64],
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    leaf_bytes: int,
    digests: NDArray[np.uint64],
) -> None:
    for run in range(len(sources)):
        leaf = firsts[run]
        for start in range(0, lengths[run], leaf_bytes):
            _digest_leaf(sources[run] + start, min(leaf_bytes, lengths[run] - start), digests, leaf)
            leaf += 1


@kernel
def _copy_each(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    leaf_bytes: int,
    mask: Any,
    digests: NDArray[np.uint64],
    largest: NDArray[np.uint64],
) -> None:
    for run in range(len(sources)):
        leaf = firsts[run]
        most = np.uint64(0)
        for start in range(0, lengths[run], leaf_bytes):
            length = min(leaf_bytes, lengths[run] - start)
            found = _copy_leaf(sources[run] + start, targets[run] + start, length, mask, digests, leaf)
            most = max(most, found)
            leaf += 1
        largest[run] = most
    _finish_stores()


@kernel
def _fill_each(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    leaf_bytes: int,
    digests: NDArray[np.uint64],
) -> None:
    for run in range(len(sources)):
        leaf = firsts[run]
        for start in range(0, lengths[run], leaf_bytes):
            length = min(leaf_bytes, lengths[run] - start)
            _fill_leaf(sources[run] + start, targets[run] + start, length, digests, leaf)
            leaf += 1


# -- XXH3 as instructions ----------------------------------------------------------------------------------------------


def _unseen(_offset: Any, _values: Any) -> None:
    """Nothing is done with a line but to hash it."""


def _unprepared(_first: Any) -> None:
    """Nothing is done before a block is read."""


def _hash(
    builder: Any,
    data: Any,
    length: Any,
    visit: Callable[[Any, Any], None],
    out: Any,
    place: Any,
    prepare: Callable[[Any], None] = _unprepared,
) -> None:
    """XXH3-128 of `length` bytes at `data`, to the words 2 `place` and 2 `place` + 1 of `out`.

    `visit(offset, line)` makes what is done with each line besides; where `length` is no multiple of a line the last
    one overlaps the one before. `prepare(offset)` makes what is done before a whole block is read.
    """
    allocate: Any = cgutils.alloca_once_value
    constant: Any = cgutils.global_constant
    table = constant(builder, "paceline_xxh3_secret", ir.Constant(_bytes_type(), bytearray(_SECRET)))
    secret = builder.bitcast(table, ir.IntType(8).as_pointer())
    running = allocate(builder, ir.Constant(_STRIPE, list(_START)))

    def stripe(offset: Any, key: Any) -> None:
        place = builder.bitcast(builder.gep(data, [offset]), _STRIPE.as_pointer())
        values = builder.load(place, align=1)
        visit(offset, values)
        builder.store(_mixed(builder, builder.load(running), values, key), running)

    before_the_last = builder.sub(length, _word(1))
    blocks = builder.lshr(before_the_last, _word(10))
    with cgutils.for_range(builder, blocks) as block:
        first = builder.mul(block.index, _word(_BLOCK_BYTES))
        prepare(first)
        for number in range(_BLOCK_LINES):
            stripe(builder.add(first, _word(number * LINE_BYTES)), _key(number * 8))
        builder.store(_scrambled(builder, builder.load(running)), running)
    first = builder.mul(blocks, _word(_BLOCK_BYTES))
    with cgutils.for_range(builder, builder.lshr(builder.sub(before_the_last, first), _word(6))) as line:
        key = builder.bitcast(builder.gep(secret, [builder.mul(line.index, _word(8))]), _STRIPE.as_pointer())
        stripe(builder.add(first, builder.mul(line.index, _word(LINE_BYTES))), builder.load(key, align=1))
    stripe(builder.sub(length, _word(LINE_BYTES)), _key(len(_SECRET) - LINE_BYTES - 7))
    words = builder.bitcast(out, _WORD.as_pointer())
    for number, half in enumerate(_merged(builder, builder.load(running), length)):
        where = builder.add(builder.mul(place, _word(2)), _word(number))
        builder.store(half, builder.gep(words, [where]))


def _move_lines(builder: Any, source: Any, target: Any) -> None:
    """Copy a block."""
    for number in range(_BLOCK_LINES):
        line = builder.gep(source, [_word(number * LINE_BYTES)])
        _prefetch(builder, line, _READ_BY_OTHERS)
        values = builder.load(builder.bitcast(line, _STRIPE.as_pointer()), align=1)
        there = builder.bitcast(builder.gep(target, [_word(number * LINE_BYTES)]), _STRIPE.as_pointer())
        builder.store(values, there, align=1)


def _prefetch(builder: Any, line: Any, locality: int) -> None:
    """Ask for the line `_PREFETCH_BYTES` later; none has to be there."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), number, number, number])
    declare: Any = cgutils.get_or_insert_function
    later = builder.gep(line, [_word(_PREFETCH_BYTES)])
    for_reading, kept, data = (ir.Constant(number, value) for value in (0, locality, 1))
    builder.call(declare(builder.module, kind, "llvm.prefetch.p0"), [later, for_reading, kept, data])


def _mixed(builder: Any, running: Any, values: Any, key: Any) -> Any:
    """The accumulators after one stripe."""
    keyed = builder.xor(values, key)
    low = builder.and_(keyed, ir.Constant(_STRIPE, [0xFFFFFFFF] * 8))
    product = builder.mul(low, builder.lshr(keyed, ir.Constant(_STRIPE, [32] * 8)))
    order = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(values, values, order)
    return builder.add(builder.add(running, swapped), product)


def _scrambled(builder: Any, running: Any) -> Any:
    """The accumulators at the end of a block."""
    shifted = builder.xor(running, builder.lshr(running, ir.Constant(_STRIPE, [47] * 8)))
    keyed = builder.xor(shifted, _key(len(_SECRET) - LINE_BYTES))
    return builder.mul(keyed, ir.Constant(_STRIPE, [_PRIME_32[0]] * 8))


def _merged(builder: Any, running: Any, length: Any) -> tuple[Any, Any]:
    """The high and the low word of the digest."""
    low = builder.mul(length, _word(_PRIME_64[0]))
    high = builder.not_(builder.mul(length, _word(_PRIME_64[1])))
    at_high = len(_SECRET) - LINE_BYTES - 11
    return _folded(builder, running, high, at_high), _folded(builder, running, low, 11)


def _folded(builder: Any, running: Any, start: Any, secret_at: int) -> Any:
    wide = ir.IntType(128)
    total = start
    for pair in range(4):
        factors = []
        for lane in (2 * pair, 2 * pair + 1):
            word = builder.extract_element(running, ir.Constant(ir.IntType(32), lane))
            factors.append(builder.zext(builder.xor(word, _word(_secret_word(secret_at + 8 * lane))), wide))
        product = builder.mul(*factors)
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)
        total = builder.add(total, builder.xor(builder.trunc(product, _WORD), upper))
    total = builder.xor(total, builder.lshr(total, _word(37)))
    total = builder.mul(total, _word(_AVALANCHE))
    return builder.xor(total, builder.lshr(total, _word(32)))


def _key(secret_at: int) -> Any:
    return ir.Constant(_STRIPE, [_secret_word(secret_at + 8 * lane) for lane in range(8)])


def _secret_word(at: int) -> int:
    return int.from_bytes(_SECRET[at : at + 8], "little")


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _bytes_type() -> Any:
    return ir.ArrayType(ir.IntType(8), len(_SECRET))


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _data_of(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
    """Where the data of an array argument begins."""
    array = context.make_array(signature.args[number])(context, builder, arguments[number])
    return builder.bitcast(array.data, ir.IntType(8).as_pointer())


def _splat(builder: Any, vector: Any, value: Any) -> Any:
    index = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(index, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count))


def _largest_lane(builder: Any, vector: Any, values: Any) -> Any:
    name = f"llvm.vector.reduce.umax.v{vector.count}i{vector.element.width}"
    declare: Any = cgutils.get_or_insert_function
    reduce = declare(builder.module, ir.FunctionType(vector.element, [vector]), name)
    lane = builder.call(reduce, [values])
    return lane if vector.element.width == 64 else builder.zext(lane, _WORD)
