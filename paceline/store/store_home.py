"""The directory of one weight store: only its user may enter, and it is cleared away when its owner has died.

A store's home is `store-*` below a directory of the user's choice. Its owner keeps a lock on it that the kernel gives
up with the process; homes whose lock is free belong to nobody and are removed when the next store starts there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from paceline.store.lease import try_lock_exclusive

_PREFIX = "store-"


class StoreHome:
    """Made, locked and later removed by one owner. `path` has mode 0700."""

    def __init__(self, directory: str) -> None:
        # One at a time: a home that is made but not locked yet must not look like a dead owner's.
        parent = _open_directory(directory)
        try:
            fcntl.flock(parent, fcntl.LOCK_EX)
            for home in Path(directory).glob(f"{_PREFIX}*"):
                _remove_if_stale(home)
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=directory)
            self._lock_fd = _open_directory(self.path)
            try_lock_exclusive(self._lock_fd)
        finally:
            os.close(parent)

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _remove_if_stale(home: Path) -> None:
    try:
        fd = _open_directory(str(home))
    except OSError:
        return  # not a directory of this user, so not ours to remove
    try:
        if try_lock_exclusive(fd):
            shutil.rmtree(home, ignore_errors=True)
    finally:
        os.close(fd)


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
