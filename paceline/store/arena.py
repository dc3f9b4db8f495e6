"""One arena, owner's end: memory that one process writes for life and any number read.

All pages are there before the first capture. The owner's own map is read-only except between `begin_write` and
`end_write`, and `begin_write` succeeds only while nobody holds a lease: a write to a leased arena faults.
"""

from __future__ import annotations

import mmap
import os
import uuid

import numpy as np
from numpy.typing import NDArray

from paceline.store.arena_backing import ArenaKind, create_backing, seal
from paceline.store.arena_stamp import STAMP_BYTES, write_stamp
from paceline.store.lease import reopen_read_only, try_lock_exclusive, unlock
from paceline.store.pages import MappedPages

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Arena:
    """`capacity` bytes, then the stamp's page. `array` is the payload as uint8; writable only during a capture.

    Raises:
        CapacityError: there is not room enough for it, with the bytes needed and free.
    """

    def __init__(self, capacity: int, *, kind: ArenaKind, directory: str) -> None:
        self.arena_id = uuid.uuid4().hex
        self.kind = kind
        self.capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self.capacity + STAMP_BYTES
        fd = create_backing(kind, self.arena_id, size, directory)
        try:
            self._pages = MappedPages(fd, size, _READ_WRITE)
            self._pages.populate_for_writing()
            self._pages.collapse()
            self._stamp = self._pages.array(self.capacity, STAMP_BYTES)
            write_stamp(self._stamp, self.arena_id, None)
            # Opened before the seal: a file's mode then lets nobody write, and these only read.
            self._lock_fd = reopen_read_only(fd)
            self._shared_fd = reopen_read_only(fd)
            seal(kind, fd)
        finally:
            os.close(fd)
        self.array: NDArray[np.uint8] = self._pages.array(0, self.capacity)
        self._pages.protect(mmap.PROT_READ)

    @property
    def shared_fd(self) -> int:
        """The descriptor to pass to readers; its description is never locked."""
        return self._shared_fd

    def begin_write(self) -> bool:
        """Make the payload writable, without a version; False (and nothing is changed) while a lease is held."""
        if not try_lock_exclusive(self._lock_fd):
            return False
        self._pages.protect(_READ_WRITE)
        write_stamp(self._stamp, self.arena_id, None)
        return True

    def end_write(self, version: int | None) -> None:
        """Close the payload again, holding `version` from now on; None: what was written is of no version."""
        write_stamp(self._stamp, self.arena_id, version)
        self._pages.protect(mmap.PROT_READ)
        unlock(self._lock_fd)

    def is_leased(self) -> bool:
        """Whether any reader holds a lease now. Not to be asked during a capture."""
        if not try_lock_exclusive(self._lock_fd):
            return True
        unlock(self._lock_fd)
        return False

    def close(self) -> None:
        """Give up descriptors; memory goes when the last map of it, here or in a reader, is gone."""
        os.close(self._lock_fd)
        os.close(self._shared_fd)
        del self.array, self._stamp, self._pages
