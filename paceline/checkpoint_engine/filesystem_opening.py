"""Which storage a URL means: POSIX files with locks, or anything else that fsspec reads."""

from __future__ import annotations

from paceline.checkpoint_engine.filesystem_local import LocalStorage
from paceline.checkpoint_engine.filesystem_objects import ObjectStorage
from paceline.checkpoint_engine.filesystem_storage import VersionStorage
from paceline.core.errors import ConfigError, SyncError


def open_storage(url: str) -> VersionStorage:
    """The storage of a URL that fsspec knows, or of an absolute path.

    Raises:
        ConfigError: fsspec does not know it, or lacks the library for it.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"cannot open {url}: {' '.join(str(error).split())}") from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(url, path)
    return ObjectStorage(url, filesystem, path)


def newest_life(url: str) -> int:
    """The highest life with a version at a root that a writer can use; 0 when it holds none.

    Raises:
        ConfigError: see `open_storage` and `VersionStorage.prepare_writing`.
    """
    storage = open_storage(url)
    try:
        storage.prepare_writing()
        return max((version.life for version in storage.versions()), default=0)
    except (OSError, SyncError) as error:
        raise ConfigError(f"cannot list the weights at {url}: {error}") from error
    finally:
        storage.close()
