"""Digests that processes of one node take once for all of them, of bytes that they share and that never change.

For nodes without a weight store (`digest_ledger` is the store's own, and says why one may rely on another's digest: one
copy of the bytes on the node, no writer, the same user). Here a file stands for the bytes: who locks it while it is
empty hashes, and writes what it has found; the next reads that. The kernel gives up the lock of one that dies, so its
place is free; one that hangs is not waited for longer than the caller's patience.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.store.lease import lock_exclusive

_KEPT = 8
_MAX_BYTES = 1024
_log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    by: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class NodeDigests:
    """One process's view of them. `directory` is the run's alone; it may be one that several nodes see."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def once(
        self, node: str, key: str, holder: str, take: Callable[[], str], patience_seconds: float
    ) -> tuple[str, str]:
        """`(digest, by)` of what `key` (a file name) stands for on `node`: another's, or what `take` returns.

        What `take` raises is raised, and the next one takes it. Where files cannot be used every process hashes.
        """
        try:
            fd = self._open(node, key)
        except OSError as error:
            _log.warning("verify.not_shared: %s hashes for itself: %s", holder, error)
            return take(), holder
        try:
            if not lock_exclusive(fd, patience_seconds):
                _log.warning("verify.not_waited_for: %s hashes for itself: %s is still at it", holder, _name(fd))
                return take(), holder
            found = _read(fd)
            if found is not None:
                return found.digest, found.by
            _write(fd, holder)
            entry = _Entry(take(), holder)
            _write(fd, entry)
            return entry.digest, entry.by
        finally:
            os.close(fd)

    def _open(self, node: str, key: str) -> int:
        place = self._directory / node
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        older = sorted(place.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in older[: max(0, len(older) - _KEPT)]:
            path.unlink(missing_ok=True)
        return os.open(place / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write(fd: int, what: _Entry | str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, msgspec.json.encode(what), 0)


def _read(fd: int) -> _Entry | None:
    """A whole entry; None: nobody has got that far."""
    try:
        return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=_Entry)
    except msgspec.MsgspecError:
        return None


def _name(fd: int) -> str:
    try:
        return msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=str)
    except msgspec.MsgspecError:
        return "another process of this node"
