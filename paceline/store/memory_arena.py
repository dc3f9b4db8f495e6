"""One arena, owner's end: a sealed memfd that one process writes for life and any number read.

The seals refuse every other writer and every change of size, for ever; nothing appears in a file system and nothing
stays after the last process is gone. All pages are there before the first capture. The owner's own map is read-only
except between `begin_write` and `end_write`, and `begin_write` succeeds only while nobody holds a lease: a write to a
leased arena faults.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import uuid

import numpy as np
from numpy.typing import NDArray

from paceline.store.arena_stamp import STAMP_BYTES, write_stamp
from paceline.store.lease import reopen_read_only, try_lock_exclusive, unlock

F_SEAL_FUTURE_WRITE = 0x10  # no constant in Python 3.11
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


class MemoryArena:
    """`capacity` bytes, then the stamp's page. `array` is the payload as uint8; writable only during a capture."""

    def __init__(self, capacity: int) -> None:
        self.arena_id = uuid.uuid4().hex
        self.capacity = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self.capacity + STAMP_BYTES
        fd = os.memfd_create(f"paceline-{self.arena_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
            _populate(self._map)
            write_stamp(self._map, self.capacity, self.arena_id, None)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            self._lock_fd = reopen_read_only(fd)
            self._shared_fd = reopen_read_only(fd)
        finally:
            os.close(fd)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, self.capacity)
        self._protect(mmap.PROT_READ)

    @property
    def shared_fd(self) -> int:
        """The descriptor to pass to readers; its description is never locked."""
        return self._shared_fd

    def begin_write(self) -> bool:
        """Make the payload writable, without a version; False (and nothing is changed) while a lease is held."""
        if not try_lock_exclusive(self._lock_fd):
            return False
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        write_stamp(self._map, self.capacity, self.arena_id, None)
        return True

    def end_write(self, version: int | None) -> None:
        """Close the payload again, holding `version` from now on; None: what was written is of no version."""
        write_stamp(self._map, self.capacity, self.arena_id, version)
        self._protect(mmap.PROT_READ)
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
        del self.array
        try:
            self._map.close()
        except BufferError:
            # A tensor over the map is still referenced; the map goes with it.
            return

    def _protect(self, protection: int) -> None:
        address = ctypes.c_void_p(np.frombuffer(self._map, np.uint8).ctypes.data)
        if _LIBC.mprotect(address, ctypes.c_size_t(len(self._map)), ctypes.c_int(protection)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"mprotect of arena {self.arena_id}: {os.strerror(code)}")


def _populate(pages: mmap.mmap) -> None:
    try:
        pages.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        # Kernels before 5.14 do not know the advice: touch every page.
        np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE] = 0
