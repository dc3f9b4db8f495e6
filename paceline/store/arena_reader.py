"""A process's view of the stores it reads from: one map per arena, kept from lease to lease.

Only the arenas of the store that was asked last are kept; those of a store before it (a writer of an earlier life) go
when their last lease ends. So a reader maps each arena of its node once, and no more.
"""

from __future__ import annotations

import os
import time

from paceline.store.arena_channel import LeaseConnection, request_arena
from paceline.store.channel_messages import ArenaRequest
from paceline.store.mapped_arena import ArenaLease, MappedArena


class ArenaReader:
    """Leases arenas by name. Not thread-safe: one per receiver."""

    def __init__(self) -> None:
        self._address = ""
        self._mapped: dict[str, MappedArena] = {}

    def lease(
        self, *, address: str, arena_id: str, version: int, total_bytes: int, holder: str, deadline_seconds: float
    ) -> tuple[ArenaLease, LeaseConnection]:
        """Ask the store at `address` for an arena and take a lease on it, under the name `holder`.

        The connection is closed, and with it the name gone, when the lease ends.

        Raises:
            SyncError: the store is gone, or does not have this version any more.
            DeadlineExceeded: the store does not answer.
        """
        end = time.monotonic() + deadline_seconds
        request = ArenaRequest(arena_id=arena_id, version=version, holder=holder)
        fd, kind, connection = request_arena(address, request, deadline_seconds)
        try:
            if address != self._address:
                self._address, self._mapped = address, {}
            if arena_id not in self._mapped:
                self._mapped[arena_id] = MappedArena(fd, arena_id=arena_id, kind=kind)
            left = max(0.0, end - time.monotonic())
            lease = self._mapped[arena_id].lease(version=version, total_bytes=total_bytes, deadline_seconds=left)
        except BaseException:  # the name goes with the lease that did not come about
            connection.close()
            raise
        finally:
            os.close(fd)
        lease.at_end(connection.close)
        return lease, connection

    def close(self) -> None:
        """Drop the maps; leases go on."""
        self._mapped = {}
