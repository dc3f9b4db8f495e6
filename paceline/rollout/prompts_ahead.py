"""PromptsAhead: prompts made beside the event loop, ahead of their admission: some take long to make.

consumes: the prompts of a source; produces: prompts that are there at once; waits for: the source, room; unblocked by:
`next_prompt`, which takes one. Law: order and place are the source's. `state` is where it stood behind the last prompt
that was given, not behind what has been made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from paceline.core.errors import PromptError
from paceline.core.ports import Clock, PromptSource, Work
from paceline.core.sample import Prompt

AHEAD = 64
BATCH_SECONDS = 0.05  # then what has been made is handed over, be it a single one


class _Made(NamedTuple):
    """A prompt, or why there is none (an error; None: the data has ended), and where the source stands behind it."""

    outcome: Prompt | Exception | None
    state: msgspec.Struct

    @property
    def is_last(self) -> bool:
        """Whether the source is not to be asked again."""
        return not isinstance(self.outcome, Prompt | PromptError)


class PromptsAhead:
    """Implements `core.ports.PromptSource` over another source, which nobody else may use."""

    def __init__(self, source: PromptSource, *, work: Work, clock: Clock) -> None:
        self._source = source
        self._work = work
        self._clock = clock
        self._state = source.state()
        self._made: deque[_Made] = deque()
        self._taken = asyncio.Event()

    def next_prompt(self) -> Prompt | None:
        """See the port; None: it is still being made."""
        if not self._made:
            return None
        if self._made[0].is_last:
            made = self._made[0]
        else:
            made = self._made.popleft()
            self._taken.set()
        self._state = made.state
        if isinstance(made.outcome, Exception):
            raise made.outcome
        return made.outcome

    def validation_prompts(self) -> Sequence[Prompt]:
        """As the source has them."""
        return self._source.validation_prompts()

    def state(self) -> msgspec.Struct:
        """See the port."""
        return self._state

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Make prompts for ever; `on_ready` is called whenever there are more."""
        while True:
            if len(self._made) > AHEAD // 2 or (self._made and self._made[-1].is_last):
                self._taken.clear()
                await self._taken.wait()
                continue
            self._made.extend(await self._work.run(partial(self._make, AHEAD - len(self._made))))
            on_ready()

    def _make(self, most: int) -> list[_Made]:
        began = self._clock.now()
        made = [self._make_one()]
        while len(made) < most and not made[-1].is_last and self._clock.now() - began < BATCH_SECONDS:
            made.append(self._make_one())
        return made

    def _make_one(self) -> _Made:
        outcome: Prompt | Exception | None
        try:
            outcome = self._source.next_prompt()
        except Exception as error:  # whatever it is, whoever draws the prompt is to have it
            outcome = error
        return _Made(outcome, self._source.state())
