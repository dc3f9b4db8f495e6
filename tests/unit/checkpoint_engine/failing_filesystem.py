"""An fsspec file system in memory that fails, or stops for ever, at a chosen write."""

from __future__ import annotations

import errno
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class Stopped(BaseException):
    """The process is gone: nothing it would do after this is done."""


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`failures[0]` is what each write from the `after`-th on raises; removals fail too once a process is gone."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    failures: ClassVar[list[BaseException]] = []
    after: ClassVar[int] = 0

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb" and self.failures:
            if FailingFileSystem.after == 0:
                raise self.failures[0]
            FailingFileSystem.after -= 1
        return super()._open(path, mode, **kwargs)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        if self.failures and isinstance(self.failures[0], Stopped) and FailingFileSystem.after == 0:
            raise Stopped
        super().rm(path, recursive, maxdepth)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
