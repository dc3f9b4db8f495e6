"""Versions on a POSIX file system: whole files by rename, durable by fsync, kept from removal while read.

A file appears under its name only when all its bytes are on disk. A reader holds a shared lock on the marker while it
copies, and a version whose marker is locked is not removed; the kernel ends the lock with its holder. The writer holds
an exclusive lock on the root's stamp. No symbolic link below the root is followed, and only plain files are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from paceline.checkpoint_engine.filesystem_storage import (
    FORMAT,
    MARKER_NAME,
    STAMP_NAME,
    Stamp,
    decode_exact,
    parse_version,
)
from paceline.core.errors import ConfigError, SyncError
from paceline.core.version import Version

TEMP_PREFIX = ".writing-"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Some network file systems have no locks; there the age and number of versions kept must do.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_WRITE_BYTES = 64 << 20


class LocalStorage:
    """Implements `filesystem_storage.VersionStorage` below the directory `path`."""

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        self._root = Path(path)
        self._lock: int | None = None

    def prepare_writing(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_stamp()
        except OSError as error:
            raise ConfigError(f"cannot write weights to {self.url}: {error.strerror or error}") from error

    def versions(self) -> list[Version]:
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(version for name in names if (version := parse_version(name)) is not None)

    def is_complete(self, version: Version) -> bool:
        try:
            return stat.S_ISREG((self._root / str(version) / MARKER_NAME).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def free_bytes(self) -> int | None:
        free = os.statvfs(self._root)
        return free.f_bavail * free.f_frsize

    def write(self, version: Version, name: str, parts: Sequence[bytes | memoryview]) -> None:
        directory = self._root / str(version)
        with suppress(FileExistsError):
            directory.mkdir()
            _sync_directory(self._root)
        where = os.open(directory, _DIRECTORY)
        try:
            temp = TEMP_PREFIX + name
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            _write_durably(os.open(temp, flags, 0o644, dir_fd=where), parts)
            os.rename(temp, name, src_dir_fd=where, dst_dir_fd=where)
            os.fsync(where)
        finally:
            os.close(where)

    @contextmanager
    def reading(self, version: Version) -> Iterator[_LocalReading]:
        where = os.open(self._root / str(version), _DIRECTORY)
        try:
            marker = os.open(MARKER_NAME, _READ, dir_fd=where)
            try:
                # A marker that is locked for removal, or was unlinked before the lock was taken, is a version gone.
                if not _try_lock(marker, fcntl.LOCK_SH) or os.fstat(marker).st_nlink == 0:
                    raise FileNotFoundError(errno.ENOENT, "removed", MARKER_NAME)
                yield _LocalReading(where)
                if os.fstat(marker).st_nlink == 0:
                    raise FileNotFoundError(errno.ENOENT, "removed while it was read", MARKER_NAME)
            finally:
                os.close(marker)
        finally:
            os.close(where)

    def remove(self, version: Version) -> bool:
        directory = self._root / str(version)
        marker = directory / MARKER_NAME
        if self.is_complete(version):
            locked = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not _try_lock(locked, fcntl.LOCK_EX):
                    return False
                marker.unlink()
                _sync_directory(directory)
            finally:
                os.close(locked)
        for entry in list(directory.iterdir()):
            entry.unlink()
        directory.rmdir()
        return True

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _lock_stamp(self) -> int:
        stamp = self._root / STAMP_NAME
        if not stamp.exists() and any(self._root.iterdir()):
            raise ConfigError(f"{self.url} is not empty and holds no weight versions (it has no {STAMP_NAME})")
        descriptor = os.open(stamp, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                raise ConfigError(f"another process publishes weights to {self.url}")
            found = os.pread(descriptor, 4096, 0)
            if found:
                _check_stamp(found, self.url)
            else:
                os.pwrite(descriptor, msgspec.json.encode(Stamp(FORMAT)), 0)
                os.fsync(descriptor)
                _sync_directory(self._root)
        except BaseException:  # whatever it is, the lock must not stay
            os.close(descriptor)
            raise
        return descriptor


class _LocalReading:
    """Implements `filesystem_storage.VersionReading` over an open directory."""

    def __init__(self, where: int) -> None:
        self._where = where

    @contextmanager
    def open(self, name: str) -> Iterator[_LocalFile]:
        try:
            descriptor = os.open(name, _READ, dir_fd=self._where)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SyncError(f"{name} is a symbolic link, which is not followed") from error
            raise
        with closing(_LocalFile(descriptor, name)) as file:
            yield file


class _LocalFile:
    """Implements `filesystem_storage.StoredFile`."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        found = os.fstat(descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise SyncError(f"{name} is no plain file")

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        left = [target for target in targets if len(target)]
        while left:
            count = os.preadv(self._descriptor, left, offset)
            if count == 0:
                raise SyncError(f"{self._name} ends at byte {offset}")
            offset += count
            left = _after(left, count)

    def close(self) -> None:
        os.close(self._descriptor)


def _check_stamp(found: bytes, url: str) -> None:
    try:
        decode_exact(found, Stamp, STAMP_NAME)
    except SyncError as error:
        raise ConfigError(f"{url} belongs to something else: {error.message}") from error


def _write_durably(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _after(targets: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the targets after `count` bytes."""
    left: list[memoryview] = []
    for target in targets:
        taken = min(count, len(target))
        count -= taken
        if taken < len(target):
            left.append(target[taken:])
    return left


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    """False when another has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
