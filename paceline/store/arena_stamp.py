"""The last page of an arena: which arena it is and which version it holds.

The stamp says "no version" from before the first byte of a capture is written until after the last. Owner and readers
touch it only under their locks, so a reader that holds its lease reads either the version whose bytes are there, or
none.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SyncError

STAMP_BYTES = mmap.PAGESIZE
_FORMAT = struct.Struct("<16s32sq")
_MAGIC = b"paceline arena 1"
_NO_VERSION = -1


def write_stamp(page: NDArray[np.uint8], arena_id: str, version: int | None) -> None:
    """Write the stamp at the start of `page`; `version` None: the bytes are of no version."""
    packed = _FORMAT.pack(_MAGIC, arena_id.encode("ascii"), _NO_VERSION if version is None else version)
    page[: len(packed)] = np.frombuffer(packed, np.uint8)


def read_stamp(page: NDArray[np.uint8]) -> tuple[str, int | None]:
    """Arena id and version, None when the arena holds none.

    Raises:
        SyncError: there is no stamp: the descriptor is not an arena of this format.
    """
    magic, arena_id, version = _FORMAT.unpack(page[: _FORMAT.size].tobytes())
    if magic != _MAGIC:
        raise SyncError("the descriptor from the weight store is not an arena")
    return arena_id.decode("ascii", "replace"), None if version == _NO_VERSION else version
