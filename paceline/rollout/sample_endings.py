"""Ends of samples that do not reach the trainer: each is counted once, named, and made up for by another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.events import EventSink, SampleDropped, SampleFailed
from paceline.rollout.outstanding import Outstanding
from paceline.rollout.sample_deadlines import SampleDeadlines


class SampleEndings:
    """`on_free` is called whenever a place has come free."""

    def __init__(
        self,
        outstanding: Outstanding,
        deadlines: SampleDeadlines,
        *,
        events: EventSink,
        on_free: Callable[[], None],
    ) -> None:
        self._outstanding = outstanding
        self._deadlines = deadlines
        self._events = events
        self._on_free = on_free

    def fail(self, sample_id: str, error: str) -> None:
        """It could not be made."""
        self._events.emit(SampleFailed(ids=[sample_id], error=error))
        self._release(sample_id)

    def drop(self, sample_id: str, reason: str, lengths: Mapping[int, int]) -> None:
        """It is not wanted, for this reason; `lengths` are those of its responses."""
        self._events.emit(SampleDropped(ids=[sample_id], reason=reason, lengths=dict(lengths)))
        self._release(sample_id)

    def _release(self, sample_id: str) -> None:
        self._deadlines.end(sample_id)
        self._outstanding.fail(sample_id)
        self._on_free()
