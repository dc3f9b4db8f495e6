"""Shows the admission window to people, about once a second."""

from __future__ import annotations

from paceline.core.events import AdmissionLevel, EventSink
from paceline.core.ports import Clock
from paceline.rollout.outstanding import Outstanding

EVERY_SECONDS = 1.0


class AdmissionShow:
    """Writes `admission.level` events."""

    def __init__(self, outstanding: Outstanding, *, clock: Clock, events: EventSink) -> None:
        self._outstanding = outstanding
        self._clock = clock
        self._events = events
        self._next_at = float("-inf")

    def show(self, *, in_flight: int) -> None:
        """Show the window as it is, unless one was shown a moment ago."""
        if self._clock.now() < self._next_at:
            return
        self._next_at = self._clock.now() + EVERY_SECONDS
        counts = self._outstanding.statistics(in_flight=in_flight)
        self._events.emit(AdmissionLevel(used=counts.used, allowed=counts.allowed, in_flight=in_flight))
