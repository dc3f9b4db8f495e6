"""One arena, reader's end: lock, map privately, touch every page, and only then believe what the stamp says.

Why a reader never sees bytes of another version than it asked for, although the owner may reuse the arena at any moment
between the passing of the descriptor and the lock:

1. The owner writes payload or stamp only while it holds the exclusive lock, and the stamp says "no version" from
   before the first payload byte until after the last. An owner that dies while writing leaves "no version".
2. The reader reads the stamp only after it holds the shared lock. The kernel never grants both locks, so no write is in
   progress then, and none can begin until the reader's lock ends.
3. So what the stamp says when the reader looks is what the payload holds, and both stay as they are for the whole
   lease. If it is not the version asked for, the reader leaves with an error and has used no byte.

The lock belongs to a description that only the map keeps open after `release`: the lease ends when the last array or
tensor over the map is gone, or when the process is, and at no other time. The channel's connection ends with it, and
with that the holder's name in the store.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.store.arena_stamp import STAMP_BYTES, read_stamp
from paceline.store.fd_channel import ArenaRequest, request_arena
from paceline.store.lease import lock_shared, reopen_read_only, unlock
from paceline.store.memory_arena import SEALS

_MADV_POPULATE_READ = 22
_log = logging.getLogger(__name__)


class MappedArena:
    """A leased arena. `array` is its payload as uint8: writes to it are the process's own and reach nobody else."""

    def __init__(self, fd: int, *, arena_id: str, version: int, total_bytes: int, deadline_seconds: float) -> None:
        """Take over nothing: `fd` stays the caller's.

        Raises:
            SyncError: not a sealed arena, too small, or the version is gone.
            DeadlineExceeded: the owner did not give the arena free.
        """
        self._fd = reopen_read_only(fd)
        try:
            size = _checked_size(self._fd, total_bytes)
            if not lock_shared(self._fd, deadline_seconds):
                message = (
                    f"arena {arena_id} of version {version} stayed locked by its writer for {deadline_seconds:.3g} s"
                )
                raise DeadlineExceeded(message, "weight store", deadline_seconds)
            self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._check_stamp(size - STAMP_BYTES, arena_id, version)
        except BaseException:  # a lease that was not handed out must not outlive its attempt
            unlock(self._fd)
            os.close(self._fd)
            raise
        # The map has a descriptor of its own for the same description: this one is needed only to end the lease early.
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, total_bytes)
        _populate(self._map, self.array)

    def keep_open(self, connection: object) -> None:
        """Close `connection` (anything with `close`) when the lease ends."""
        weakref.finalize(self._map, connection.close)  # type: ignore[attr-defined]

    def release(self) -> None:
        """End the lease as soon as no array or tensor over the map is left; at once if the caller dropped its own."""
        if not self._unmap():
            _log.warning("lease.released_in_use: weights of a released version are still referenced and stay leased")

    def abandon(self) -> None:
        """End the lease now, whoever still refers to the map; only for tensors that nobody will ever read."""
        unlock(self._fd)
        self._unmap()

    def _unmap(self) -> bool:
        self._close_fd()
        del self.array
        try:
            self._map.close()
        except BufferError:
            return False
        finally:
            del self._map
        return True

    def _check_stamp(self, start: int, arena_id: str, version: int) -> None:
        found_id, found_version = read_stamp(self._map, start)
        if (found_id, found_version) != (arena_id, version):
            held = "no version" if found_version is None else f"version {found_version}"
            raise SyncError(f"version {version} is gone from arena {arena_id}: the arena holds {held}")


def lease_arena(
    *, address: str, arena_id: str, version: int, total_bytes: int, holder: str, deadline_seconds: float
) -> MappedArena:
    """Ask the store at `address` for an arena and take a lease on it, under the name `holder`.

    Raises:
        SyncError: the store is gone, or does not have this version any more.
        DeadlineExceeded: the store does not answer.
    """
    end = time.monotonic() + deadline_seconds
    request = ArenaRequest(arena_id=arena_id, version=version, holder=holder)
    fd, connection = request_arena(address, request, deadline_seconds)
    try:
        left = max(0.0, end - time.monotonic())
        mapped = MappedArena(fd, arena_id=arena_id, version=version, total_bytes=total_bytes, deadline_seconds=left)
    except BaseException:  # the name goes with the lease that did not come about
        connection.close()
        raise
    finally:
        os.close(fd)
    mapped.keep_open(connection)
    return mapped


def _checked_size(fd: int, total_bytes: int) -> int:
    """Size of the file, once it cannot change under the map (which would be SIGBUS) nor be written by a third party."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & SEALS != SEALS:
        raise SyncError("the descriptor from the weight store is not sealed")
    size = os.fstat(fd).st_size
    if size < total_bytes + STAMP_BYTES or size % mmap.PAGESIZE:
        raise SyncError(f"the manifest claims {total_bytes} bytes, the arena has {size - STAMP_BYTES}")
    return size


def _populate(pages: mmap.mmap, array: NDArray[np.uint8]) -> None:
    """Every page in place now, so that no decode step faults one in later."""
    if len(array) == 0:
        return
    try:
        pages.madvise(_MADV_POPULATE_READ, 0, len(array))
    except OSError:
        # Kernels before 5.14 do not know the advice: touch every page.
        int(array[:: mmap.PAGESIZE].max())
