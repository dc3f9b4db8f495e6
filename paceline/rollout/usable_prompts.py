"""UsablePrompts: a prompt source without prompts that cannot be sent: longer than allowed, or of a bad row.

Law: what no engine could take is never sent. A prompt that cannot be is counted (`prompt.refused`, with its name) and
the next one takes its place, so a batch fills all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.errors import ConfigError, PromptError
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
        self._refused = 0  # since the last one that could be sent
        self._last = ""
        self.is_late = False

    def next_prompt(self) -> Prompt | None:
        """The next prompt that can be sent; None: the source has none at the moment, and `is_late` says so.

        Raises:
            ConfigError: there seems to be none.
        """
        self.is_late = False
        while self._refused < MOST_REFUSED_IN_A_ROW:
            try:
                prompt = self._source.next_prompt()
            except PromptError as error:
                self._refuse(error.prompt_id, 0, error.message)
                self._last = error.message
                continue
            if prompt is None:
                self.is_late = True
                return None
            if len(prompt.token_ids) <= self._longest:
                self._refused = 0
                return prompt
            self._refuse(prompt.prompt_id, len(prompt.token_ids), "")
            self._last = f"{prompt.prompt_id} has {len(prompt.token_ids)} tokens"
        raise ConfigError(
            f"data.max_prompt_length={self._longest}: {MOST_REFUSED_IN_A_ROW} prompts in a row are longer or cannot be "
            f"used, the last one: {self._last}"
        )

    def _refuse(self, prompt_id: str, tokens: int, reason: str) -> None:
        self._refused += 1
        self._events.emit(PromptRefused(prompt_id=prompt_id, tokens=tokens, allowed=self._longest, reason=reason))

    def validation_prompts(self) -> Sequence[Prompt]:
        """As the source has them; they are checked before anything starts."""
        return self._source.validation_prompts()

    def state(self) -> msgspec.Struct:
        """Where the source stands."""
        return self._source.state()
