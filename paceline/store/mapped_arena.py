"""One arena, reader's end: mapped once for reading, leased as often as it holds a version that is wanted.

Why a reader never sees bytes of another version than it asked for, although the owner may reuse the arena at any moment
between the passing of the descriptor and the lock:

1. The owner writes payload or stamp only while it holds the exclusive lock, and the stamp says "no version" from
   before the first payload byte until after the last. An owner that dies while writing leaves "no version".
2. The reader reads the stamp only after it holds the shared lock. The kernel never grants both locks, so no write is in
   progress then, and none can begin until the reader's lock ends.
3. So what the stamp says when the reader looks is what the payload holds, and both stay as they are for the whole
   lease. If it is not the version asked for, the reader leaves with an error and has used no byte.

The map is for reading and shared: it shows each version as it comes and costs nothing to keep, but its bytes mean
nothing without a lease. A write to it faults.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.store.arena_backing import ArenaKind, check_backing
from paceline.store.arena_stamp import STAMP_BYTES, read_stamp
from paceline.store.lease import lock_shared, reopen_read_only, unlock
from paceline.store.pages import MappedPages

_log = logging.getLogger(__name__)


class MappedArena:
    """A reader's map of one arena. Takes over nothing: `fd` stays the caller's.

    Raises:
        SyncError: the descriptor is no arena that can be mapped safely.
    """

    def __init__(self, fd: int, *, arena_id: str, kind: ArenaKind) -> None:
        size = os.fstat(fd).st_size
        check_backing(kind, fd, size)
        if size < STAMP_BYTES or size % mmap.PAGESIZE:
            raise SyncError("the descriptor from the weight store is not an arena")
        self.arena_id = arena_id
        self._capacity = size - STAMP_BYTES
        self._fd = reopen_read_only(fd)
        weakref.finalize(self, os.close, self._fd)
        self._pages = MappedPages(self._fd, size, mmap.PROT_READ)
        # Once is enough: the owner writes into the same pages, version after version.
        self._pages.populate_for_reading()

    def lease(self, *, version: int, total_bytes: int, deadline_seconds: float) -> ArenaLease:
        """Hold the arena at this version; every page of it is present already.

        Raises:
            SyncError: the version is gone, or the arena is too small for it.
            DeadlineExceeded: the owner did not give the arena free.
        """
        if total_bytes > self._capacity:
            raise SyncError(f"the manifest claims {total_bytes} bytes, the arena has {self._capacity}")
        fd = reopen_read_only(self._fd)
        try:
            if not lock_shared(fd, deadline_seconds):
                message = (
                    f"arena {self.arena_id} of version {version} stayed locked by its writer for "
                    f"{deadline_seconds:.3g} s"
                )
                raise DeadlineExceeded(message, "weight store", deadline_seconds)
            self._check_stamp(version)
        except BaseException:  # a lease that was not handed out must not outlive its attempt
            os.close(fd)
            raise
        return ArenaLease(self._pages, fd, total_bytes)

    def _check_stamp(self, version: int) -> None:
        found_id, found_version = read_stamp(self._pages.array(self._capacity, STAMP_BYTES))
        if (found_id, found_version) != (self.arena_id, version):
            held = "no version" if found_version is None else f"version {found_version}"
            raise SyncError(f"version {version} is gone from arena {self.arena_id}: the arena holds {held}")


class ArenaLease:
    """A version that stays as it is. `array` is its payload as uint8; a write to it faults.

    The lock belongs to a description that is closed when the last array or tensor over the payload is gone after
    `release`, or when the process is, and at no other time.
    """

    def __init__(self, pages: MappedPages, fd: int, total_bytes: int) -> None:
        """Take over `fd`, which holds the lock."""
        hold = _Hold(fd)
        self._hold = weakref.ref(hold)
        self._array: NDArray[np.uint8] | None = pages.array(0, total_bytes, keeper=hold)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The payload, [total_bytes] uint8; every view of it keeps the lease."""
        if self._array is None:
            raise SyncError("the lease was released")
        return self._array

    def at_end(self, action: Callable[[], object]) -> None:
        """Run `action` when the lease ends."""
        hold = self._hold()
        if hold is not None:
            weakref.finalize(hold, action)

    def release(self) -> None:
        """End the lease as soon as no array or tensor over it is left; at once if the caller dropped its own."""
        self._array = None
        if self._hold() is not None:
            _log.warning("lease.released_in_use: weights of a released version are still referenced and stay leased")

    def abandon(self) -> None:
        """End the lease now, whoever still refers to it; only for tensors that nobody will ever read."""
        hold = self._hold()
        if hold is not None:
            hold.end()
        self._array = None


class _Hold:
    """The lock's descriptor, closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def end(self) -> None:
        unlock(self._fd)
