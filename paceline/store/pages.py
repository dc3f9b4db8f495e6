"""A range of mapped memory: aligned for huge pages, present before it is used, unmapped with its last reference.

Huge pages are asked for once, by the owner (`collapse`): a map of 1 GiB is then protected, mapped or torn down in tens
of microseconds instead of tens of milliseconds. Where the kernel refuses, everything works as before, only slower.
Arrays over the range keep it mapped: there is no way to close it under a live tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SyncError

_HUGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FAILED = ctypes.c_void_p(-1).value


class MappedPages:
    """The first `size` bytes (a multiple of the page size) of a file, shared with everybody who maps it.

    `protection` (`mmap.PROT_READ`, `| mmap.PROT_WRITE`) decides what may be done. The arrays it hands out say that they
    are writable in any case, since torch takes no others without a warning: a write to a read-only range faults.
    """

    def __init__(self, fd: int, size: int, protection: int) -> None:
        libc = _libc()
        # Room for an aligned start: huge pages need file offset and address to agree.
        reserved = libc.mmap(None, size + _HUGE_BYTES, 0, _anonymous_flags(), -1, 0)
        if reserved == _MAP_FAILED:
            raise _os_error("reserving address space")
        self.address = -(-reserved // _HUGE_BYTES) * _HUGE_BYTES
        self.size = size
        mapped = libc.mmap(self.address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if mapped == _MAP_FAILED:
            error = _os_error("mapping an arena")
            libc.munmap(reserved, size + _HUGE_BYTES)
            raise error
        head, end = self.address - reserved, self.address + size
        if head:
            libc.munmap(reserved, head)
        if _HUGE_BYTES - head:
            libc.munmap(end, _HUGE_BYTES - head)
        self._unmap = weakref.finalize(self, libc.munmap, self.address, size)
        self._unmap.atexit = False  # at the end of the process the kernel does it, and threads may still read

    def array(self, start: int, length: int, keeper: object | None = None) -> NDArray[np.uint8]:
        """`length` bytes from `start` as uint8; the array, and every view of it, keeps the map and `keeper` alive."""
        if start < 0 or length < 0 or start + length > self.size:
            raise SyncError(f"{length} bytes at {start} do not lie in a map of {self.size} bytes")
        exporter = _Exporter(self.address + start, length, (self, keeper))
        array: NDArray[np.uint8] = np.asarray(exporter)
        return array

    def protect(self, protection: int) -> None:
        """Change the protection of the whole range."""
        if _libc().mprotect(self.address, self.size, protection) != 0:
            raise _os_error("mprotect of an arena")

    def populate_for_writing(self) -> None:
        """Have every page present and writable now."""
        if _libc().madvise(self.address, self.size, _MADV_POPULATE_WRITE) != 0:
            # Kernels before 5.14 do not know the advice: touch every page.
            self.array(0, self.size)[:: mmap.PAGESIZE] = 0

    def populate_for_reading(self) -> None:
        """Have every page present now, so that no decode step faults one in later."""
        if self.size and _libc().madvise(self.address, self.size, _MADV_POPULATE_READ) != 0:
            int(self.array(0, self.size)[:: mmap.PAGESIZE].max())

    def collapse(self) -> bool:
        """Ask for huge pages under the range; False where the kernel gives none."""
        return self.size >= _HUGE_BYTES and _libc().madvise(self.address, self.size, _MADV_COLLAPSE) == 0


class _Exporter:
    """What numpy refers to as the base of an array; its end is the end of all views."""

    def __init__(self, address: int, length: int, kept: tuple[object, ...]) -> None:
        self.__array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._kept = kept


def _anonymous_flags() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _libc() -> Any:
    """The C library with the signatures that are needed here; loading it again is a look-up."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
