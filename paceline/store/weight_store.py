"""The versions of one writer on one node: a fixed number of arenas, one of them the newest published version.

States of an arena: FREE -> WRITING -> HOLDS(version) -> FREE again, once it is neither the newest nor leased. A capture
never waits: where no arena is free it is refused, with the names of the holders. Versions only rise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

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
            SyncError: every arena is leased or the newest; names the holders.
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
            newest = None if self._newest is None else self._versions[self._newest]
            if newest is not None and version <= newest:
                raise VersionError(f"version {version} cannot follow version {newest}")
            # Without a version first, then the oldest: what is newer may still be asked for.
            for arena in sorted(self._spare(), key=lambda arena: self._versions[arena.arena_id] or -1):
                if arena.begin_write():
                    self._server.forget_digests(arena.arena_id)
                    self._versions[arena.arena_id] = None
                    self._writing = arena.arena_id
                    return arena
            raise SyncError(f"no free arena for version {version}: held by {', '.join(self._blocking())}")

    def _spare(self) -> list[Arena]:
        return [arena for arena in self._arenas if arena.arena_id not in (self._newest, self._writing)]

    def _blocking(self) -> list[str]:
        names: list[str] = []
        for arena in self._spare():
            if not arena.is_leased():
                return []
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
        raise SyncError(f"the weight store has no arena {request.arena_id}")


def _described(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
