"""How the kernels of the delta are compiled: numba, without the interpreter lock, kept on disk where that can be done.

A kernel is compiled at its first call for each element width. The compiled code is kept beside the source file, or,
where that folder is read-only, in the user's own cache folder; where neither can be written it is compiled anew in each
process. numba renews it when the kernel's *own* file changes, so a kernel calls only kernels of its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile `function` at its first call; wrapping integer arithmetic, no bounds checks, one thread."""
    compile_kept: Callable[[F], Any] = numba.njit(nogil=True, cache=True)
    compile_anew: Callable[[F], Any] = numba.njit(nogil=True)
    try:
        return cast("F", compile_kept(function))
    except RuntimeError:  # no folder that can be written
        return cast("F", compile_anew(function))


def operation(code: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the processor that numba has no word for; `code` gives its type and its LLVM instructions."""
    found: Callable[..., Any] = intrinsic(code)
    return found
