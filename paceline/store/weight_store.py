"""The versions of one writer on one node: a fixed number of arenas, one of them the newest published version.

States of an arena: FREE -> WRITING -> HOLDS(version) -> FREE again, once it is not leased. The newest version is given
up last, and only when nobody has taken it and every other arena is leased: a version that no reader could take blocks
nothing. A capture never waits: where no arena is free it is refused, with the names of the holders. Versions only rise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SyncError, VersionError
from paceline.store.arena import Arena
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_server import ArenaServer
from paceline.store.channel_messages import ArenaRequest
from paceline.store.store_home import StoreHome


class WeightStore:
    """Writer's end. Thread-safe: captures on one thread, the channel on its own, questions from any."""

    def __init__(self, *, directory: str, arenas: int, capacity: int, kind: ArenaKind = "memfd") -> None:
        """Allocate `arenas` arenas of `capacity` bytes for good and listen below `directory`.

        Raises:
            CapacityError: there is not room enough; nothing is left behind.
        """
        self._home = StoreHome(directory)
        self._arenas: list[Arena] = []
        try:
            for _ in range(arenas):
                self._arenas.append(Arena(capacity, kind=kind, directory=self._home.path))
        except BaseException:  # half a store is none
            self._give_up()
            raise
        self._versions: dict[str, int | None] = {arena.arena_id: None for arena in self._arenas}
        self._newest: str | None = None
        self._last_version: int | None = None
        self._writing: str | None = None
        self._mutex = threading.Lock()
        self._server = ArenaServer(self._home.path, self._descriptor, kind)

    @property
    def address(self) -> str:
        """Where readers ask: the path of the socket."""
        return self._server.address

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[Arena]:
        """A free arena to write `version` into; it is published when the block ends, and of no version if it raises.

        Raises:
            VersionError: the version is not above the newest one.
            SyncError: every arena is leased; names the holders.
        """
        arena = self._take(version)
        published: int | None = None
        try:
            yield arena
            published = version
        finally:
            with self._mutex:
                arena.end_write(published)
                self._versions[arena.arena_id] = published
                self._writing = None
                if published is not None:
                    self._newest = arena.arena_id
                    self._last_version = published

    def payload(self, arena_id: str) -> NDArray[np.uint8] | None:
        """The bytes of an arena, for reading; None when there is no such arena."""
        with self._mutex:
            return next((arena.array for arena in self._arenas if arena.arena_id == arena_id), None)

    def blocking_holders(self) -> list[str]:
        """Who keeps the next capture from finding an arena; empty when one is free."""
        with self._mutex:
            return self._blocking()

    def close(self) -> None:
        """Stop serving and give up the arenas; readers keep what they have leased."""
        self._server.close()
        with self._mutex:
            self._give_up()

    def _give_up(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas = []
        self._home.remove()

    def _take(self, version: int) -> Arena:
        with self._mutex:
            if self._writing is not None:
                raise SyncError("another capture is being written")
            if self._last_version is not None and version <= self._last_version:
                raise VersionError(f"version {version} cannot follow version {self._last_version}")
            for arena in self._in_order():
                if arena.begin_write():
                    self._server.forget_digests(arena.arena_id)
                    self._versions[arena.arena_id] = None
                    self._newest = None if arena.arena_id == self._newest else self._newest
                    self._writing = arena.arena_id
                    return arena
            raise SyncError(f"no free arena for version {version}: held by {', '.join(self._blocking())}")

    def _in_order(self) -> list[Arena]:
        """Those that a capture may take, best first: without a version, then the oldest, the newest last."""
        others = [arena for arena in self._arenas if arena.arena_id != self._writing]
        return sorted(others, key=lambda arena: (arena.arena_id == self._newest, self._versions[arena.arena_id] or -1))

    def _blocking(self) -> list[str]:
        names: list[str] = []
        for arena in self._in_order():
            if not arena.is_leased():
                return []
            if arena.arena_id != self._newest:
                names += self._server.holders(arena.arena_id) or [f"an unnamed holder of arena {arena.arena_id}"]
        return list(dict.fromkeys(names))

    def _descriptor(self, request: ArenaRequest) -> int:
        """Answer the channel. Only a courtesy: what a reader may believe is the stamp, once it holds its lock."""
        with self._mutex:
            for arena in self._arenas:
                if arena.arena_id == request.arena_id:
                    held = self._versions[arena.arena_id]
                    if held != request.version:
                        raise SyncError(f"version {request.version} is gone: its arena holds {_described(held)}")
                    return arena.shared_fd
        raise SyncError(f"the weight store has no arena {request.arena_id!r}")


def _described(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
