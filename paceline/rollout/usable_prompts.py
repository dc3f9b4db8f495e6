"""UsablePrompts: a prompt source without prompts that are longer than allowed.

Law: what no engine could take is never sent. A prompt that is too long is counted (`prompt.refused`) and the next one
takes its place, so a batch fills all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.events import EventSink, PromptRefused
from paceline.core.ports import PromptSource
from paceline.core.sample import Prompt

MOST_REFUSED_IN_A_ROW = 10_000


class UsablePrompts:
    """Implements `core.ports.PromptSource` over another source. `longest` is in tokens."""

    def __init__(self, source: PromptSource, *, longest: int, events: EventSink) -> None:
        self._source = source
        self._longest = longest
        self._events = events

    def next_prompt(self) -> Prompt | None:
        """The next prompt that is short enough.

        Raises:
            ConfigError: there seems to be none.
        """
        for _ in range(MOST_REFUSED_IN_A_ROW):
            prompt = self._source.next_prompt()
            if prompt is None or len(prompt.token_ids) <= self._longest:
                return prompt
            self._events.emit(
                PromptRefused(prompt_id=prompt.prompt_id, tokens=len(prompt.token_ids), allowed=self._longest)
            )
        raise ConfigError(
            f"data.max_prompt_length={self._longest}: {MOST_REFUSED_IN_A_ROW} prompts in a row are longer"
        )

    def validation_prompts(self) -> Sequence[Prompt]:
        """As the source has them; they are checked before anything starts."""
        return self._source.validation_prompts()

    def state(self) -> msgspec.Struct:
        """Where the source stands."""
        return self._source.state()
