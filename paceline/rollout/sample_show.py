"""SampleShow: now and then one response for a person to look at."""

from __future__ import annotations

from paceline.core.events import EventSink, SampleShown
from paceline.core.ports import Clock
from paceline.core.sample import Sample

SHOW_EVERY_SECONDS = 1.0


class SampleShow:
    """Emits `sample.shown` at most once a second."""

    def __init__(self, *, clock: Clock, events: EventSink) -> None:
        self._clock = clock
        self._events = events
        self._shown_at = float("-inf")

    def show(self, sample: Sample) -> None:
        """Show the first response of this sample, unless one was shown just now."""
        if self._clock.now() - self._shown_at < SHOW_EVERY_SECONDS:
            return
        self._shown_at = self._clock.now()
        response = sample.responses[0]
        self._events.emit(
            SampleShown(
                prompt=sample.prompt.text,
                response=response.text,
                reward=response.reward,
                version=response.versions[-1] if response.versions else 0,
            )
        )
