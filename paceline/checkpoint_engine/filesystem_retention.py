"""Which versions stay at a root: the newest, the young, those that somebody reads, and whatever their chains need."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.checkpoint_engine.filesystem_reading import read_stored
from paceline.checkpoint_engine.filesystem_storage import VersionStorage
from paceline.core.errors import SyncError
from paceline.core.version import Version

logger = logging.getLogger(__name__)


class Retention:
    """The writer's record of the versions at `storage`: when each was published, and which one it is a delta of.

    A full version needs none, even where a delta lies beside it.
    """

    def __init__(self, storage: VersionStorage, *, keep_versions: int, keep_seconds: float) -> None:
        self._storage = storage
        self._keep_versions = keep_versions
        self._keep_seconds = keep_seconds
        self._published: dict[Version, float] = {}
        self._needs: dict[Version, Version] = {}
        self.held: list[Version] = []

    def __len__(self) -> int:
        return len(self._published)

    def __contains__(self, version: Version) -> bool:
        return version in self._published

    @property
    def newest(self) -> Version | None:
        """The newest version, None when there is none."""
        return max(self._published, default=None)

    def found(self, version: Version, now: float) -> None:
        """A version of an earlier life; one that cannot be read needs nothing."""
        needs: Version | None = None
        where = f"{self._storage.url}/{version}"
        try:
            with self._storage.reading(version) as reading:
                stored = read_stored(reading, where)
            if stored.kind == "delta" and stored.weights.delta is not None:
                needs = Version.unpack(stored.weights.delta.base_version)
        except (OSError, SyncError) as error:
            logger.warning("filesystem.unreadable %s: %s", where, error)
        self.add(version, now, needs)

    def add(self, version: Version, now: float, needs: Version | None) -> None:
        """A version was published; it can be read only together with `needs`."""
        self._published[version] = now
        if needs is not None:
            self._needs[version] = needs

    def prune(self, now: float) -> None:
        """Remove what is old and needed by nobody. Failures are logged: the next time tries again."""
        ordered = sorted(self._published)
        young = [version for version, at in self._published.items() if now - at < self._keep_seconds]
        needed = self._closure([*ordered[-self._keep_versions :], *young])
        self.held = []
        # The newest first: of one that is being read the chain stays too.
        for version in reversed(ordered):
            if version in needed:
                continue
            if not self._remove(version):
                self.held.append(version)
                needed |= self._closure([version])

    def _closure(self, versions: Iterable[Version]) -> set[Version]:
        """These and all that their chains need."""
        found: set[Version] = set()
        for version in versions:
            link: Version | None = version
            while link is not None and link not in found:
                found.add(link)
                link = self._needs.get(link)
        return found

    def _remove(self, version: Version) -> bool:
        """False when a reader has it open."""
        try:
            if not self._storage.remove(version):
                return False
        except FileNotFoundError:
            logger.warning("filesystem.prune_missing %s %s", self._storage.url, version)
        except (OSError, SyncError) as error:
            logger.warning("filesystem.prune_failed %s %s: %s", self._storage.url, version, error)
            return True
        self._published.pop(version)
        self._needs.pop(version, None)
        return True
