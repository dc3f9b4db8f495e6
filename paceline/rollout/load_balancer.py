"""Chooses the replica for a prompt: the one with the least outstanding responses among those that may get traffic.

All responses of a prompt go to one replica, so its prompt is prefilled once. A replica gets nothing before its first
confirmed version (V5).
"""

from __future__ import annotations

from collections.abc import Iterable


class LoadBalancer:
    """Counts outstanding responses per replica; ties go to the replica named first."""

    def __init__(self, replica_ids: Iterable[str]) -> None:
        self._outstanding = dict.fromkeys(replica_ids, 0)
        self._routable: set[str] = set()

    def open(self, replica_id: str) -> None:
        """This replica has confirmed a version and may get traffic."""
        self._routable.add(replica_id)

    def choose(self, responses: int) -> str | None:
        """The least loaded routable replica, charged with these responses; None when there is none."""
        candidates = [name for name in self._outstanding if name in self._routable]
        if not candidates:
            return None
        best = min(candidates, key=lambda name: self._outstanding[name])
        self._outstanding[best] += responses
        return best

    def done(self, replica_id: str, responses: int) -> None:
        """These responses came back from the replica."""
        self._outstanding[replica_id] -= responses

    def outstanding(self, replica_id: str) -> int:
        """Responses that this replica still owes."""
        return self._outstanding[replica_id]
