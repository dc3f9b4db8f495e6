"""Chooses the replica for a prompt: the one with the least outstanding responses among those that may get traffic.

All responses of a prompt go to one replica, so its prompt is prefilled once. A replica gets nothing before its first
confirmed version (V5), nor while it is fenced.
"""

from __future__ import annotations


class LoadBalancer:
    """Counts outstanding responses per replica; ties go to the newest version, then to who was opened first."""

    def __init__(self) -> None:
        self._outstanding: dict[str, int] = {}
        self._versions: dict[str, int] = {}

    def open(self, replica_id: str, version: int) -> None:
        """This replica has confirmed this version (packed) and may get traffic; what it owes is not forgotten."""
        self._outstanding.setdefault(replica_id, 0)
        self._versions[replica_id] = version

    def close(self, replica_id: str) -> None:
        """No more traffic for this replica; what it owed is forgotten. Twice is harmless."""
        self._outstanding.pop(replica_id, None)
        self._versions.pop(replica_id, None)

    def choose(self, responses: int) -> str | None:
        """The least loaded routable replica, charged with these responses; None when there is none."""
        if not self._outstanding:
            return None
        best = min(self._outstanding, key=lambda name: (self._outstanding[name], -self._versions[name]))
        self._outstanding[best] += responses
        return best

    def done(self, replica_id: str, responses: int) -> None:
        """These responses came back from the replica."""
        if replica_id in self._outstanding:
            self._outstanding[replica_id] -= responses

    def outstanding(self, replica_id: str) -> int:
        """Responses that this replica still owes."""
        return self._outstanding.get(replica_id, 0)
