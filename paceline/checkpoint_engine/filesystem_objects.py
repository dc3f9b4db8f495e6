"""Versions in whatever fsspec reaches (s3, gcs, memory, ...): no locks, no renames, no word on free space.

A single object appears whole or not at all, and the marker is the last one written and the first one removed. Nothing
keeps a reader's version from being removed; it then finds the marker gone. One writer per root is the caller's duty.
What was written is looked up before it counts: some implementations take writes that they cannot keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from paceline.checkpoint_engine.filesystem_storage import FORMAT, MARKER_NAME, STAMP_NAME, Stamp, parse_version
from paceline.core.errors import ConfigError, SyncError
from paceline.core.version import Version

_WRITE_BYTES = 16 << 20


class ObjectStorage:
    """Implements `filesystem_storage.VersionStorage` below `path` of an fsspec file system."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = path.rstrip("/")

    def prepare_writing(self) -> None:
        stamp = msgspec.json.encode(Stamp(FORMAT))
        path = f"{self._root}/{STAMP_NAME}"
        try:
            with self._calling("prepare"):
                if not self._filesystem.exists(path):
                    if self._list():
                        raise ConfigError(f"{self.url} is not empty and holds no weight versions (no {STAMP_NAME})")
                    self._filesystem.makedirs(self._root, exist_ok=True)
                    self._put(path, [stamp])
                if self._filesystem.cat_file(path) != stamp:
                    raise ConfigError(f"{self.url} belongs to something else: {STAMP_NAME} is not of {FORMAT}")
        except (SyncError, OSError) as error:
            raise ConfigError(f"cannot write weights to {self.url}: {error}") from error

    def versions(self) -> list[Version]:
        with self._calling("list"):
            names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in self._list()]
        return sorted(version for name in names if (version := parse_version(name)) is not None)

    def is_complete(self, version: Version) -> bool:
        with self._calling("look at"):
            self._filesystem.invalidate_cache()
            return bool(self._filesystem.exists(self._path(version, MARKER_NAME)))

    def free_bytes(self) -> int | None:
        return None

    def write(self, version: Version, name: str, parts: Sequence[bytes | memoryview]) -> None:
        with self._calling("write"):
            self._filesystem.makedirs(f"{self._root}/{version}", exist_ok=True)
            self._put(self._path(version, name), parts)

    @contextmanager
    def reading(self, version: Version) -> Iterator[_ObjectReading]:
        if not self.is_complete(version):
            raise FileNotFoundError(f"{self.url}/{version} has no marker")
        yield _ObjectReading(self, f"{self._root}/{version}")
        if not self.is_complete(version):
            raise FileNotFoundError(f"{self.url}/{version} was removed while it was read")

    def remove(self, version: Version) -> bool:
        with self._calling("remove"):
            self._filesystem.invalidate_cache()
            marker = self._path(version, MARKER_NAME)
            if self._filesystem.exists(marker):
                self._filesystem.rm_file(marker)
            # Where directories are only prefixes of names, the last object took the directory with it.
            with suppress(FileNotFoundError):
                self._filesystem.rm(f"{self._root}/{version}", recursive=True)
        return True

    def close(self) -> None:
        """There is no lock."""

    def size(self, path: str) -> int:
        """Bytes of an object."""
        with self._calling("read"):
            info = self._filesystem.info(path)
            if info.get("type") != "file" or not isinstance(info.get("size"), int):
                raise SyncError(f"{path} is no plain file")
            return int(info["size"])

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes of a range."""
        with self._calling("read"):
            data: bytes = self._filesystem.cat_file(path, start=start, end=stop)
            return data

    def _put(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        with self._filesystem.open(path, "wb") as file:
            for part in parts:
                for start in range(0, len(part), _WRITE_BYTES):
                    file.write(part[start : start + _WRITE_BYTES])
        self._filesystem.invalidate_cache()
        written = sum(len(part) for part in parts)
        try:
            kept = self.size(path)
        except FileNotFoundError as error:
            raise SyncError(f"{written} bytes were written to {path}, which is not there") from error
        if kept != written:
            raise SyncError(f"{written} bytes were written to {path}, and {kept} are there")

    def _path(self, version: Version, name: str) -> str:
        return f"{self._root}/{version}/{name}"

    def _list(self) -> list[dict[str, Any]]:
        self._filesystem.invalidate_cache()
        try:
            found: list[dict[str, Any]] = self._filesystem.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return found

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SyncError, ConfigError):
            raise
        except Exception as error:  # every fsspec implementation has errors of its own
            raise SyncError(f"cannot {what} {self.url}: {type(error).__name__}: {error}") from error


class _ObjectReading:
    """Implements `filesystem_storage.VersionReading`."""

    def __init__(self, storage: ObjectStorage, directory: str) -> None:
        self._storage = storage
        self._directory = directory

    @contextmanager
    def open(self, name: str) -> Iterator[_ObjectFile]:
        yield _ObjectFile(self._storage, f"{self._directory}/{name}")


class _ObjectFile:
    """Implements `filesystem_storage.StoredFile`; each read is one request."""

    def __init__(self, storage: ObjectStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self.size = storage.size(path)

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        wanted = sum(len(target) for target in targets)
        if not wanted:
            return
        data = memoryview(self._storage.read(self._path, offset, offset + wanted))
        if len(data) != wanted:
            raise SyncError(f"{self._path} ends at byte {offset + len(data)}")
        for target in targets:
            target[:] = data[: len(target)]
            data = data[len(target) :]
