"""Leases: a lock on an arena that the kernel gives up when its holder dies, and that never ends by time.

A lock belongs to an *open file description*, and a descriptor that was passed over a socket shares its sender's. So
whoever locks opens the file anew first: a reader its own (shared lock), the owner one that it never passes on
(exclusive lock). Two descriptions conflict even in one process.
"""

from __future__ import annotations

import fcntl
import os
import time

_RETRY_SECONDS = 0.002


def reopen_read_only(fd: int) -> int:
    """A new descriptor with a description of its own, for reading."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def try_lock_exclusive(fd: int) -> bool:
    """The owner's lock; False while any reader holds a lease."""
    return _try_lock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int, deadline_seconds: float) -> bool:
    """A reader's lock; False when the owner kept the arena for all of the deadline.

    The owner holds its lock only for a capture or for the moment of a test, so a failed try is repeated.
    """
    return _lock_within(fd, fcntl.LOCK_SH, deadline_seconds)


def lock_exclusive(fd: int, deadline_seconds: float) -> bool:
    """The lock that only one may have; False when another kept it for all of the deadline."""
    return _lock_within(fd, fcntl.LOCK_EX, deadline_seconds)


def unlock(fd: int) -> None:
    """End the lock of this descriptor's description, whoever else has a descriptor of it."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def _lock_within(fd: int, kind: int, deadline_seconds: float) -> bool:
    end = time.monotonic() + deadline_seconds
    while not _try_lock(fd, kind):
        if time.monotonic() >= end:
            return False
        time.sleep(_RETRY_SECONDS)
    return True


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
