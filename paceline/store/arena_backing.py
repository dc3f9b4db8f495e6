"""What an arena's bytes lie in: a sealed memfd, or a file that has lost its name.

    memfd  the kernel refuses every other writer and every change of size, for ever (seals)
    file   in a directory of one's choice (a tmpfs, a DAX or huge page mount), for kernels and sandboxes without memfd;
           all its blocks are reserved up front, so that too little room is an error with the numbers and never a
           SIGBUS later; its name is removed before the first byte is written, so that nothing is left when the owner
           dies. It has no seals: it is mode 0400, and a process of the same user that goes out of its way can write it.

Both are handed on as descriptors over the store's socket, and readers map what they get.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Literal

from paceline.core.errors import CapacityError, SyncError

ArenaKind = Literal["memfd", "file"]
F_SEAL_FUTURE_WRITE = 0x10  # no constant in Python 3.11
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_BLOCK_BYTES = 512


def create_backing(kind: ArenaKind, arena_id: str, size: int, directory: str) -> int:
    """A descriptor of `size` bytes that all exist, for reading and writing; `directory` is for files.

    Raises:
        CapacityError: there is not room enough; with the bytes needed and free.
    """
    fd = _memfd(arena_id) if kind == "memfd" else _nameless_file(arena_id, directory)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        raise CapacityError(f"an arena needs {size} bytes, {_free(kind, directory)} ({error.strerror})") from error
    return fd


def seal(kind: ArenaKind, fd: int) -> None:
    """No writer but the map that exists, no other size, from now on; for a file as far as its mode goes."""
    if kind == "memfd":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    else:
        os.fchmod(fd, stat.S_IRUSR)


def check_backing(kind: ArenaKind, fd: int, size: int) -> None:
    """What a reader asks of a descriptor before it maps `size` bytes of it.

    Raises:
        SyncError: it may change under the map, which would be SIGBUS, or is not that large.
    """
    found = os.fstat(fd)
    if kind == "memfd" and _seals(fd) & SEALS != SEALS:
        raise SyncError("the descriptor from the weight store is not sealed")
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise SyncError("the descriptor from the weight store is no file of this user")
    if found.st_size < size:
        raise SyncError(f"an arena of {size} bytes was announced, the descriptor has {found.st_size}")
    if kind == "file" and (found.st_nlink or found.st_blocks * _BLOCK_BYTES < size):
        raise SyncError("the file from the weight store has a name or holes")


def _memfd(arena_id: str) -> int:
    return os.memfd_create(f"paceline-{arena_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _nameless_file(arena_id: str, directory: str) -> int:
    path = Path(directory) / f"arena-{arena_id}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd


def _free(kind: ArenaKind, directory: str) -> str:
    if kind == "memfd":
        return "the kernel has no more memory for it"
    room = os.statvfs(directory)
    return f"but {room.f_bavail * room.f_frsize} bytes are free in {directory}"


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0
