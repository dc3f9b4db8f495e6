"""FilesystemFollower: finds the newest version at a root, from any process or cluster that can read it.

It asks again and again (files cannot call back), writes nothing, and hands out manifests for a `FilesystemReceiver`.
Under a virtual clock, time is the clock's alone.
"""

from __future__ import annotations

import asyncio

from paceline.checkpoint_engine.filesystem_format import announced
from paceline.checkpoint_engine.filesystem_opening import open_storage
from paceline.checkpoint_engine.filesystem_reading import read_stored
from paceline.checkpoint_engine.filesystem_storage import VersionStorage
from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock, Work
from paceline.core.version import Version

# The newest version can go between two looks only if as many newer ones as are kept were published meanwhile.
_LOOKS = 5


class FilesystemFollower:
    """Follows the versions at `url`; looks every `poll_seconds`."""

    def __init__(self, url: str, *, clock: Clock, work: Work, poll_seconds: float = 0.5) -> None:
        self._clock = clock
        self._work = work
        self._poll_seconds = poll_seconds
        self._storage = open_storage(url)

    def latest(self) -> WeightManifest | None:
        """The manifest of the newest whole version, checked; None when there is none. Blocks on the storage.

        Raises:
            SyncError: what is there cannot be right, or the storage fails.
        """
        return self._newer_than(-1)

    async def wait_newer(self, version: int, deadline_seconds: float) -> WeightManifest:
        """The newest whole version above `version` (packed; -1: any), once there is one.

        Raises:
            DeadlineExceeded: none came in time; names the writer at the URL.
            SyncError: as `latest`.
        """
        end = self._clock.now() + deadline_seconds
        try:
            # A storage that does not answer must not outlast the deadline either.
            async with asyncio.timeout(deadline_seconds):
                while True:
                    found = await self._work.run(lambda: self._newer_than(version))
                    if found is not None:
                        return found
                    left = end - self._clock.now()
                    if left <= 0:
                        break
                    await self._clock.sleep(min(self._poll_seconds, left))
        except TimeoutError as error:
            raise self._too_late(version, deadline_seconds) from error
        raise self._too_late(version, deadline_seconds)

    def _newer_than(self, version: int) -> WeightManifest | None:
        for _ in range(_LOOKS):
            newest = _newest(self._storage)
            if newest is None or newest.packed <= version:
                return None
            where = f"{self._storage.url}/{newest}"
            try:
                with self._storage.reading(newest) as reading:
                    stored = read_stored(reading, where)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SyncError(f"{where} cannot be read: {error}") from error
            if stored.weights.version != newest.packed or stored.weights.arena_id != str(newest):
                raise SyncError(f"{where} holds the manifest of version {Version.unpack(stored.weights.version)}")
            return announced(stored.weights, self._storage.url)
        raise SyncError(f"the newest version at {self._storage.url} went {_LOOKS} times while it was read")

    def _too_late(self, version: int, seconds: float) -> DeadlineExceeded:
        after = "a first version" if version < 0 else f"a version after {Version.unpack(version)}"
        culprit = f"the writer of {self._storage.url}"
        return DeadlineExceeded(f"waited {seconds:g} s for {after} at {self._storage.url}", culprit, seconds)


def _newest(storage: VersionStorage) -> Version | None:
    try:
        return next((version for version in reversed(storage.versions()) if storage.is_complete(version)), None)
    except OSError as error:
        raise SyncError(f"{storage.url} cannot be read: {error}") from error
