"""The staleness budget in samples: how many may be admitted while one version is published.

A window opens when a version is published. It counts all samples that are not trained when that version is captured:
leases for those that are outstanding (queued, in flight, waiting to be sent again) and for those that are admitted in
it, a number for those that the trainer has taken already. What ends without being trained gives its place back, once;
what is trained does not: its place is free in the next window. So a window holds what the trainer consumes before the
next version, and the threshold's share of that; with threshold 0 the run is strictly on-policy.
"""

from __future__ import annotations

from collections.abc import Collection


class AdmissionBudget:
    """Leases of one window; `allowed` is `Config.max_required_samples`."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._is_open = False  # until the first version is published (V5)
        self._leases: set[str] = set()
        self._spent = 0
        self._extra = 0

    @property
    def used(self) -> int:
        """Samples counted in this window."""
        return len(self._leases) + self._spent if self._is_open else self._allowed

    @property
    def allowed(self) -> int:
        """Samples that one window may hold."""
        return self._allowed

    @property
    def free(self) -> int:
        """Samples that may still be admitted in this window."""
        return max(0, self._allowed + self._extra - self.used)

    def admit(self, sample_id: str) -> bool:
        """Lease a place; False when the window is full."""
        if self.free == 0:
            return False
        self._leases.add(sample_id)
        return True

    def give_back(self, sample_id: str) -> None:
        """This sample ended without being trained. Twice is harmless."""
        self._leases.discard(sample_id)

    def give_back_taken(self, sample_id: str) -> None:
        """The same of one that the trainer has taken, in this window or before it opened."""
        if sample_id in self._leases:
            self._leases.discard(sample_id)
        else:
            self._spent = max(0, self._spent - 1)

    def make_room(self, places: int) -> None:
        """Have so many places free in this window at least, whatever is allowed."""
        self._extra += max(0, places - self.free)

    def open_window(self, outstanding: Collection[str], spent: int = 0) -> None:
        """A new version is published; `outstanding` samples are still on their way to the trainer. `spent` more are the
        trainer's and were not trained before this version was captured.
        """
        self._is_open = True
        self._leases = set(outstanding)
        self._spent = spent
        self._extra = 0
