"""The staleness budget in samples: how many may be admitted while one version is published.

A window opens when a version is published and starts with what is still outstanding: in flight, waiting to be put,
queued. Each admission takes one; a sample that ends without reaching the trainer gives it back. With threshold 0 the
window is exactly what the trainer consumes before the next version, so the run is strictly on-policy.
"""

from __future__ import annotations


class AdmissionBudget:
    """Counts one window; `allowed` is `Config.max_required_samples`."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._used = allowed  # closed until the first version is published (V5)

    @property
    def used(self) -> int:
        """Samples counted in this window."""
        return self._used

    @property
    def allowed(self) -> int:
        """Samples that one window may hold."""
        return self._allowed

    @property
    def free(self) -> int:
        """Samples that may still be admitted in this window."""
        return max(0, self._allowed - self._used)

    def admit(self) -> bool:
        """Take one place; False when the window is full."""
        if self._used >= self._allowed:
            return False
        self._used += 1
        return True

    def give_back(self) -> None:
        """A sample of this window ended without reaching the trainer."""
        self._used = max(0, self._used - 1)

    def open_window(self, outstanding: int) -> None:
        """A new version is published; `outstanding` samples are still on their way to the trainer."""
        self._used = outstanding
