"""A swap that is due at the end of a decode step.

The thread that decodes makes it there and goes on with the next step by itself: if it handed the swap to the event loop
and were handed the next step, each sequence would wait for two threads to be woken, on a busy machine for longer than
for the swap. What follows from the swap is settled on the event loop, which is told at once.

States: due -> made (went well | failed).
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import PacelineError
from paceline.core.ports import Clock
from paceline.core.weight_ports import StagedWeights


class StepSwap:
    """One swap; `attempt` makes it and gives the weights that were served before."""

    def __init__(self, attempt: Callable[[], StagedWeights | None], clock: Clock) -> None:
        self._attempt = attempt
        self._clock = clock
        self._previous: StagedWeights | None = None
        self._error: PacelineError | None = None
        self.is_made = False
        self.pause_seconds = 0.0

    @property
    def went_well(self) -> bool:
        """Whether it was made, and not refused."""
        return self.is_made and self._error is None

    def make(self, pause_began: float) -> None:
        """Between two steps. The errors of a swap are kept for the one who asked for it."""
        try:
            self._previous = self._attempt()
        except PacelineError as error:
            self._error = error
        self.is_made = True
        self.pause_seconds = self._clock.now() - pause_began

    def previous(self) -> StagedWeights | None:
        """The weights served before; raises what the swap raised."""
        if self._error is not None:
            raise self._error
        return self._previous
