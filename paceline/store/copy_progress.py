"""Where the copies of a version have come that run on this node: a hint for the others.

Law: who copies while another one does goes on where that one is, and comes to what he left out last. Both then ask for
the same bytes at the same time, and memory is read once for both (cooperative scans: Zukowski et al., VLDB 2007). A
hint is never a truth: whatever is read here, every byte is copied once, and nothing waits.

One slot in a file of the store's home, mapped by every reader: version, place, time. Who copies writes it, without a
lock; what is old, or of another version, says nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

_NAME = "copies"
_SLOT_BYTES = 24
_FRESH_NANOSECONDS = 20_000_000  # a place is written every few milliseconds


class CopyBoard:
    """A process's map of the slot below `home`. Where it cannot be made nobody is told anything."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._slot = _mapped(home / _NAME)

    def of(self, version: int) -> VersionCopies:
        """The copies of one version."""
        return VersionCopies(self._slot, version)


class VersionCopies:
    """Implements `core.weight_ports.CopyProgress`."""

    def __init__(self, slot: np.ndarray[tuple[int], np.dtype[np.int64]], version: int) -> None:
        self._slot = slot
        self._version = version

    def place(self) -> int | None:
        """See `CopyProgress`."""
        version, place, told = self._slot.tolist()
        fresh = 0 <= time.monotonic_ns() - told < _FRESH_NANOSECONDS
        return place if fresh and version == self._version else None

    def tell(self, place: int) -> None:
        """See `CopyProgress`."""
        self._slot[:] = (self._version, place, time.monotonic_ns())


def _mapped(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SLOT_BYTES)
            return np.frombuffer(mmap.mmap(fd, _SLOT_BYTES), np.int64)
        finally:
            os.close(fd)
    except OSError:  # nobody else is told then, and nobody tells
        return np.zeros(_SLOT_BYTES // 8, np.int64)
