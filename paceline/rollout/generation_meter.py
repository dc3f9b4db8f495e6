"""What a replica did, as one `generation.window` event about every second."""

from __future__ import annotations

from typing import Protocol

from paceline.core.events import EventSink, GenerationWindow
from paceline.core.ports import Clock

WINDOW_SECONDS = 1.0


class Load(Protocol):
    """What has requests: an engine, or the streams of a server."""

    @property
    def version(self) -> int | None: ...

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...


class GenerationMeter:
    """Sums the decode steps of a window and emits it when it is over; idle time counts as part of the window."""

    def __init__(self, *, replica_id: str, clock: Clock, events: EventSink) -> None:
        self._replica_id = replica_id
        self._clock = clock
        self._events = events
        self._restart()

    def step(self, *, seconds: float, tokens: int, validation_tokens: int, live: Load) -> None:
        """Count one decode step; `live` is the engine of the newest version."""
        self._steps += 1
        self._busy_seconds += seconds
        self._tokens += tokens
        self._validation_tokens += validation_tokens
        if self._clock.now() - self._began >= WINDOW_SECONDS:
            self.flush(live)

    def flush(self, live: Load) -> None:
        """Emit what has been counted, if anything."""
        if not self._steps:
            return
        elapsed = self._clock.now() - self._began
        self._events.emit(
            GenerationWindow(
                replica=self._replica_id,
                version=live.version or 0,
                seconds=elapsed,
                busy_seconds=min(self._busy_seconds, elapsed),
                steps=self._steps,
                tokens=self._tokens,
                validation_tokens=self._validation_tokens,
                running=live.running,
                waiting=live.waiting,
            )
        )
        self._restart()

    def _restart(self) -> None:
        self._began = self._clock.now()
        self._steps = 0
        self._busy_seconds = 0.0
        self._tokens = 0
        self._validation_tokens = 0
