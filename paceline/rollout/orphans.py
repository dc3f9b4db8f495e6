"""Orphans: requests whose replica is lost, or that one gave back, until another replica takes them.

Law: a sample that may be lost only once more goes without any other such sample beside it. A prompt that kills its
replica takes its neighbours' chances with it; so the last one tells which of them it was, and that one alone is set
aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.sample import GenerationRequest
from paceline.rollout.fleet import Fleet
from paceline.rollout.groups import Groups, parse_request_id


class Orphans:
    """Each entry has requests of one sample. `last_chance` is the number of losses after which one more is too many."""

    def __init__(self, groups: Groups, fleet: Fleet, *, last_chance: int) -> None:
        self._groups = groups
        self._fleet = fleet
        self._last_chance = last_chance
        self._waiting: deque[list[GenerationRequest]] = deque()
        self._suspects: list[list[GenerationRequest]] = []
        self._tried = ""  # the suspect in flight

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Somebody has to do these requests of one sample that is open."""
        sample_id, _, _ = parse_request_id(requests[0].request_id)
        is_suspect = self._groups.losses(sample_id) >= self._last_chance > 0
        if is_suspect:
            self._suspects.append(list(requests))
        else:
            self._waiting.append(list(requests))

    def send(self) -> None:
        """Give away all that may go, as long as there is a replica to take it."""
        while self._waiting and self._gave(self._waiting[0]):
            self._waiting.popleft()
        for requests in list(self._suspects):
            sample_id, _, _ = parse_request_id(requests[0].request_id)
            if (sample_id == self._tried or not self._groups.is_open(self._tried)) and self._gave(requests):
                self._suspects.remove(requests)
                self._tried = sample_id

    def _gave(self, requests: Sequence[GenerationRequest]) -> bool:
        """Whether they are somebody's now; those that nobody waits for any more are left out."""
        wanted = [request for request in requests if self._groups.awaits(request.request_id)]
        return not wanted or self._fleet.send(wanted) is not None
