"""A plain copy that stores past the caches as a capture does: what the digest and the guard are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel, operation
from paceline.weights.leaf_pass import LINE_BYTES

_LINES = 4  # in one round of the loop
_ROUND_BYTES = _LINES * LINE_BYTES


def stream_copy(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy bytes (one-dimensional, dense, of one length); a target that does not begin at a line goes the plain way."""
    whole = 0 if target.ctypes.data % LINE_BYTES else len(source) // _ROUND_BYTES
    _copy_rounds(target, source, whole)
    np.copyto(target[whole * _ROUND_BYTES :], source[whole * _ROUND_BYTES :])


@operation
def _stream_rounds(_typing: Any, target: Any, source: Any, rounds: Any) -> Any:
    """`rounds` times `_LINES` lines, stored with a hint past the cache."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8)
        to, start = (
            builder.bitcast(
                context.make_array(signature.args[place])(context, builder, arguments[place]).data, line.as_pointer()
            )
            for place in (0, 1)
        )
        past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, arguments[2]) as loop:
            first = builder.mul(loop.index, ir.Constant(loop.index.type, _LINES))
            for number in range(_LINES):
                place = builder.add(first, ir.Constant(first.type, number))
                values = builder.load(builder.gep(start, [place]), align=1)
                stored = builder.store(values, builder.gep(to, [place]), align=LINE_BYTES)
                stored.set_metadata("nontemporal", past_the_cache)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(target, source, types.int64), code


@kernel
def _copy_rounds(target: NDArray[np.uint8], source: NDArray[np.uint8], rounds: int) -> None:
    _stream_rounds(target, source, rounds)
