"""A copy that stores past the caches, and looks for NaN and infinity in the bytes on their way.

A processor reads a line of memory before it writes a part of it. Whole lines that are stored past the cache spare that
read, which is a third of the traffic of a copy, and leave the cache to the source, which was just hashed there. The
C library does so only for copies much longer than a leaf. The look costs nothing that can be measured: the copy waits
for memory. LLVM turns the vectors and the hint into what the processor has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation

LINE_BYTES = 64
_LINES = 4  # in one round of the loop
_ROUND_BYTES = _LINES * LINE_BYTES


def stream_copy(target: NDArray[np.uint8], source: NDArray[np.uint8], mask: np.unsignedinteger[Any]) -> int:
    """Copy bytes (one-dimensional, dense, of one length) and return the largest `element & mask` of the source.

    Elements are unsigned, of the mask's type, in the machine's order; the length is a multiple of theirs. A target
    that does not begin at a line of `LINE_BYTES` is copied by numpy.
    """
    whole = 0 if target.ctypes.data % LINE_BYTES else len(source) // _ROUND_BYTES
    end = whole * _ROUND_BYTES
    largest = int(_copy_rounds(target, source, whole, mask)) if whole else 0
    if end < len(source):
        tail = source[end:]
        np.copyto(target[end:], tail)
        if mask:
            largest = max(largest, int((np.frombuffer(tail, dtype=mask.dtype) & mask).max()))
    return largest


@operation
def _stream_rounds(_typing: Any, target: Any, source: Any, rounds: Any, mask: Any) -> Any:
    """Largest masked element of `rounds` times `_LINES` lines, which are stored with a hint past the cache."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = ir.IntType(signature.args[3].bitwidth)
        lanes = 8 * LINE_BYTES // element.width
        line = ir.VectorType(element, lanes)
        to, start = (
            builder.bitcast(
                context.make_array(signature.args[place])(context, builder, arguments[place]).data, line.as_pointer()
            )
            for place in (0, 1)
        )
        masks = _splat(builder, line, arguments[3])
        past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        alloca: Any = cgutils.alloca_once_value
        largest = [alloca(builder, ir.Constant(line, [0] * lanes)) for _ in range(_LINES)]
        with cgutils.for_range(builder, arguments[2]) as loop:
            first = builder.mul(loop.index, ir.Constant(loop.index.type, _LINES))
            for number, running in enumerate(largest):
                place = builder.add(first, ir.Constant(first.type, number))
                values = builder.load(builder.gep(start, [place]), align=1)
                stored = builder.store(values, builder.gep(to, [place]), align=LINE_BYTES)
                stored.set_metadata("nontemporal", past_the_cache)
                _raise_to(builder, running, builder.and_(values, masks))
        for other in largest[1:]:
            _raise_to(builder, largest[0], builder.load(other))
        # Such stores are not ordered with later ones: whoever is told that the copy is done must find it.
        builder.fence("seq_cst")
        return _largest_lane(builder, line, builder.load(largest[0]))

    return types.uint64(target, source, rounds, mask), code


@kernel
def _copy_rounds(target: NDArray[np.uint8], source: NDArray[np.uint8], rounds: int, mask: Any) -> Any:
    return _stream_rounds(target, source, rounds, mask)


def _splat(builder: Any, vector: Any, value: Any) -> Any:
    index = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(index, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count))


def _raise_to(builder: Any, running: Any, values: Any) -> None:
    """Each lane of `running` becomes the larger of itself and that of `values`."""
    before = builder.load(running)
    builder.store(builder.select(builder.icmp_unsigned(">", values, before), values, before), running)


def _largest_lane(builder: Any, vector: Any, values: Any) -> Any:
    name = f"llvm.vector.reduce.umax.v{vector.count}i{vector.element.width}"
    declare: Any = cgutils.get_or_insert_function
    reduce = declare(builder.module, ir.FunctionType(vector.element, [vector]), name)
    lane = builder.call(reduce, [values])
    return lane if vector.element.width == 64 else builder.zext(lane, ir.IntType(64))
