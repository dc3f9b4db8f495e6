"""A task for runs of the marker model: prompts without end, a reward that differs within a group, ids as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.sample import Prompt


class PromptCursor(msgspec.Struct, frozen=True):
    """How many prompts were given."""

    given: int


class EndlessPrompts:
    """Prompts of four tokens without end; three for validation."""

    def __init__(self) -> None:
        self._given = 0

    def next_prompt(self) -> Prompt:
        """The next one; every third shares its tokens."""
        self._given += 1
        return Prompt(f"p{self._given}", "?", (1, 2, 3, self._given % 3), "", "marker")

    def validation_prompts(self) -> Sequence[Prompt]:
        """Three prompts."""
        return [Prompt(f"v{i}", "?", (1, 2, 3, 4), "", "marker") for i in range(3)]

    def state(self) -> msgspec.Struct:
        """How many were given."""
        return PromptCursor(self._given)


class LengthReward:
    """Some reward that differs within a group."""

    async def score(self, prompt: Prompt, response_text: str) -> float:
        """Text length modulo three."""
        return float(len(response_text) % 3)


class NumberDecoder:
    """Ids as text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Numbers with blanks between them."""
        return " ".join(map(str, token_ids))
