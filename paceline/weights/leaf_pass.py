"""One pass over the bytes of whole leaves: their digests, on the way a copy and a look for NaN and infinity.

The digest is XXH3-128 of the xxHash specification (Y. Collet), with its default secret and seed 0: what the xxhash
package gives for a leaf. Made here because a capture is bound by memory: each line is loaded once, hashed, looked at,
and stored past the caches (a store of a whole line with that hint spares the read of what it overwrites, a third of a
copy's traffic). One call takes many leaves and holds no interpreter lock, so threads do not wait for each other.
LLVM turns the vectors and the hint into what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation
from paceline.weights.tree_digest import LEAF_BYTES, leaf_digest

LINE_BYTES = 64
LEAST_BYTES = 256  # of a leaf; XXH3 treats inputs of up to 240 bytes in other ways

_BLOCK_LINES = 16
_BLOCK_BYTES = _BLOCK_LINES * LINE_BYTES
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


def digest_leaves(source: NDArray[np.uint8], leaf_bytes: int = LEAF_BYTES) -> list[bytes]:
    """Digests of the leaves of a dense run of bytes that starts at a leaf; the last one may be shorter."""
    whole = _before_the_tail(source, leaf_bytes, 1)
    digests = np.empty((-(-whole // leaf_bytes), 2), np.uint64)
    _digest_each(source[:whole], leaf_bytes, digests)
    return _as_bytes(digests) + ([leaf_digest(source[whole:].data)] if whole < len(source) else [])


def copy_leaves(
    target: NDArray[np.uint8],
    source: NDArray[np.uint8],
    mask: np.unsignedinteger[Any],
    leaf_bytes: int = LEAF_BYTES,
) -> tuple[list[bytes], int]:
    """Copy such a run to one of the same length; its digests, and the largest `element & mask` of the source.

    Elements are unsigned, of the mask's type, in the machine's order; the length is a multiple of theirs, unless the
    mask is 0. A target that does not begin at a line of `LINE_BYTES`, and a last leaf that is no multiple of it, go the
    plain way.
    """
    whole = 0 if target.ctypes.data % LINE_BYTES else _before_the_tail(source, leaf_bytes, LINE_BYTES)
    words = np.empty((-(-whole // leaf_bytes), 2), np.uint64)
    largest = int(_copy_each(target[:whole], source[:whole], leaf_bytes, mask, words))
    digests = _as_bytes(words)
    for start in range(whole, len(source), leaf_bytes):
        leaf = source[start : start + leaf_bytes]
        digests.append(leaf_digest(leaf.data))
        np.copyto(target[start : start + leaf_bytes], leaf)
        if mask:
            largest = max(largest, int((leaf.view(mask.dtype) & mask).max()))
    return digests, largest


def _before_the_tail(source: NDArray[np.uint8], leaf_bytes: int, unit: int) -> int:
    """Bytes before a last leaf that is too short for the compiled pass, or no multiple of `unit`."""
    tail = len(source) % leaf_bytes
    return len(source) - tail if tail < LEAST_BYTES or tail % unit else len(source)


def _as_bytes(words: NDArray[np.uint64]) -> list[bytes]:
    raw = words.astype(">u8").tobytes()
    return [raw[start : start + 16] for start in range(0, len(raw), 16)]


@operation
def _digest_leaf(_typing: Any, source: Any, start: Any, length: Any, digests: Any, place: Any) -> Any:
    """Write the digest of `length` bytes from `start` as two words, the high one first."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _pointer(context, builder, signature, arguments, 0)
        out = _pointer(context, builder, signature, arguments, 3)
        _hash(builder, builder.gep(data, [arguments[1]]), arguments[2], _unseen, out, arguments[4])
        return context.get_dummy_value()

    return types.void(source, types.int64, types.int64, digests, types.int64), code


@operation
def _copy_leaf(
    _typing: Any, target: Any, source: Any, start: Any, length: Any, mask: Any, digests: Any, place: Any
) -> Any:
    """The same; stores each line to `target`, and gives the largest masked element."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, data = (
            builder.gep(_pointer(context, builder, signature, arguments, number), [arguments[2]]) for number in (0, 1)
        )
        element = ir.IntType(signature.args[4].bitwidth)
        line = ir.VectorType(element, 8 * LINE_BYTES // element.width)
        masks = _splat(builder, line, arguments[4])
        allocate: Any = cgutils.alloca_once_value
        largest = allocate(builder, ir.Constant(line, [0] * line.count))
        past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        def store(offset: Any, values: Any) -> None:
            there = builder.bitcast(builder.gep(to, [offset]), _STRIPE.as_pointer())
            stored = builder.store(values, there, align=LINE_BYTES)
            stored.set_metadata("nontemporal", past_the_cache)
            seen, before = builder.and_(builder.bitcast(values, line), masks), builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", seen, before), seen, before), largest)

        out = _pointer(context, builder, signature, arguments, 5)
        _hash(builder, data, arguments[3], store, out, arguments[6])
        return _largest_lane(builder, line, builder.load(largest))

    return types.uint64(target, source, types.int64, types.int64, mask, digests, types.int64), code


@operation
def _finish_stores(_typing: Any) -> Any:
    """Stores past the cache are not ordered with later ones: whoever is told that the copy is done must find it."""

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@kernel
def _digest_each(source: NDArray[np.uint8], leaf_bytes: int, digests: NDArray[np.uint64]) -> None:
    for leaf in range(len(digests)):
        start = leaf * leaf_bytes
        _digest_leaf(source, start, min(leaf_bytes, len(source) - start), digests, leaf)


@kernel
def _copy_each(
    target: NDArray[np.uint8], source: NDArray[np.uint8], leaf_bytes: int, mask: Any, digests: NDArray[np.uint64]
) -> Any:
    largest = np.uint64(0)
    for leaf in range(len(digests)):
        start = leaf * leaf_bytes
        length = min(leaf_bytes, len(source) - start)
        largest = max(largest, _copy_leaf(target, source, start, length, mask, digests, leaf))
    _finish_stores()
    return largest


# -- XXH3 as instructions ----------------------------------------------------------------------------------------------


def _unseen(_offset: Any, _values: Any) -> None:
    """Nothing is done with a line but to hash it."""


def _hash(builder: Any, data: Any, length: Any, visit: Callable[[Any, Any], None], out: Any, place: Any) -> None:
    """XXH3-128 of `length` bytes at `data`, to the words 2 `place` and 2 `place` + 1 of `out`.

    `visit(offset, line)` makes what is done with each line besides; where `length` is no multiple of a line the last
    one overlaps the one before.
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


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, number: int) -> Any:
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
