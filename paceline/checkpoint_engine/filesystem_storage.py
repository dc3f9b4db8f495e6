"""Where versions lie: the seam between the filesystem checkpoint engine and a kind of storage.

Two implementations: `filesystem_local` (POSIX: atomic renames, fsync, locks) and `filesystem_objects` (whatever fsspec
reaches). A file that is not there is a `FileNotFoundError`; every other failure of the storage is an `OSError` or a
`SyncError`. Here are also the names below a root. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeVar

import msgspec

from paceline.core.errors import SyncError, VersionError
from paceline.core.version import Version

Format = Literal["paceline-weights-1"]
FORMAT: Format = "paceline-weights-1"
STAMP_NAME = "paceline-weights.json"
MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMPLETE"
_VERSION_NAME = re.compile(r"(0|[1-9][0-9]{0,6})\.(0|[1-9][0-9]{0,12})")

S = TypeVar("S", bound=msgspec.Struct)


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the root's stamp."""

    format: Format


class StoredFile(Protocol):
    """A file that is open for reading."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets (bytes), one after the other, from `offset` on; SyncError when the file ends before."""
        ...


class VersionReading(Protocol):
    """One version's directory that is open for reading; names are plain file names."""

    def open(self, name: str) -> AbstractContextManager[StoredFile]: ...


class VersionStorage(Protocol):
    """All versions below one root."""

    @property
    def url(self) -> str: ...

    def prepare_writing(self) -> None:
        """Make the root, or accept one that is stamped; keep other writers out where the storage has locks.

        Raises:
            ConfigError: it cannot be made or written, holds other things, or another process writes there.
        """
        ...

    def versions(self) -> list[Version]:
        """Versions that have a directory, whole or not, oldest first; empty when there is no root."""
        ...

    def is_complete(self, version: Version) -> bool: ...

    def free_bytes(self) -> int | None:
        """None where the storage does not say."""
        ...

    def write(self, version: Version, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file whole; once this returns it survives a crash."""
        ...

    def reading(self, version: Version) -> AbstractContextManager[VersionReading]:
        """Open a complete version; where the storage has locks it cannot be removed meanwhile."""
        ...

    def remove(self, version: Version) -> bool:
        """Remove a version, marker first; False when a reader has it open and nothing was done."""
        ...

    def close(self) -> None:
        """Let other writers in."""
        ...


def decode_exact(data: bytes, kind: type[S], what: str) -> S:
    """Decode JSON that has exactly the spelling in which it was written.

    Raises:
        SyncError: it has not; `what` names the file.
    """
    try:
        value = msgspec.json.decode(data, type=kind)
        exact = msgspec.json.encode(value) == data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SyncError(f"{what} is no {kind.__name__} of {FORMAT}: {error}") from error
    if not exact:
        raise SyncError(f"{what} is not spelled as it is written (keys twice, blanks or unknown fields)")
    return value


def parse_version(name: str) -> Version | None:
    """The version that a directory name stands for; None for any other name. Example: `parse_version("1.7")`."""
    found = _VERSION_NAME.fullmatch(name)
    if found is None:
        return None
    version = Version(int(found[1]), int(found[2]))
    try:
        return Version.unpack(version.packed)
    except VersionError:
        return None
