"""An fsspec file system with the ways of a cloud bucket, in memory.

No directories, only names with a prefix; an object appears whole, when its last part was uploaded; listings are cached
and stale until they are invalidated; the errors are its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PART_BYTES = 100  # real ones have 5 MiB at least


class BucketError(Exception):
    """What the library of a cloud raises."""


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`objects` by name; `loses` is a part of the names whose writes are accepted and not kept."""

    protocol = "bucket"
    objects: ClassVar[dict[str, bytes]] = {}
    loses: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = self._listed(path)
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        if path in self.objects:
            return [{"name": path, "size": len(self.objects[path]), "type": "file"}]
        entries: dict[str, dict[str, Any]] = {}
        for name, data in sorted(self.objects.items()):
            if not name.startswith(f"{path}/"):
                continue
            first, _, below = name.removeprefix(f"{path}/").partition("/")
            kind, size = ("directory", 0) if below else ("file", len(data))
            entries[first] = {"name": f"{path}/{first}", "size": size, "type": kind}
        return list(entries.values())

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A bucket has none."""

    def _rm(self, path: str) -> None:
        name = self._strip_protocol(path)
        if name not in self.objects:
            raise BucketError(f"NoSuchKey: {name}")
        del self.objects[name]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> _BucketFile:
        return _BucketFile(self, path, mode, block_size=PART_BYTES, cache_type="none")


class _BucketFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self._parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self._parts.append(self.buffer.getvalue())
        if final and not any(lost in self.path for lost in self.fs.loses):
            self.fs.objects[self.path] = b"".join(self._parts)
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        try:
            return bytes(self.fs.objects[self.path][start:end])
        except KeyError as error:
            raise BucketError(f"NoSuchKey: {self.path}") from error
