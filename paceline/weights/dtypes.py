"""Names of tensor types: torch's own without "torch.", read from torch itself and not from a table.

What a new torch release adds can be moved at once, since only bytes are moved.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from paceline.core.errors import SyncError


def dtype_name(dtype: torch.dtype) -> str:
    """Example: `dtype_name(torch.bfloat16) == "bfloat16"`."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        SyncError: torch has no such type, the name is a second name of one ("half"), or its tensors are quantized.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or dtype_name(found) != name:
        raise SyncError(f"{name!r} names no tensor type of torch {torch.__version__}")
    if name.startswith(("qint", "quint")):
        raise SyncError(f"tensor type {name!r} keeps its scales outside of the bytes and cannot be moved")
    return found


def is_castable(dtype: torch.dtype) -> bool:
    """Whether a transfer dtype applies: real floating types of two bytes or more. Others keep their type."""
    return dtype.is_floating_point and dtype.itemsize > 1
