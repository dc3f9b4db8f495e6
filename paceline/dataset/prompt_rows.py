"""PromptRows: rows of one or several data sets as prompts, each rendered, tokenised and cut when it is asked for.

Law: a row that cannot become a prompt is a PromptError that names it, and costs nobody but itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from paceline.core.errors import ConfigError, PromptError
from paceline.core.ports import PromptRenderer
from paceline.core.sample import Prompt
from paceline.dataset.rows import Rows
from paceline.dataset.verl_row import TaskRow, parse_row

Truncation = Literal["error", "left", "right", "filter"]


class PromptRows:
    """A sequence of prompts, in the order of the data sets and their rows.

    `longest` is in tokens; `truncation` left and right cut the beginning and the end of longer prompts, the other two
    leave them as they are, for whoever draws them to refuse.
    """

    def __init__(
        self,
        parts: Sequence[Rows],
        *,
        renderer: PromptRenderer,
        prompt_key: str,
        longest: int,
        truncation: Truncation,
    ) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        self._renderer = renderer
        self._prompt_key = prompt_key
        self._longest = longest
        self._truncation = truncation

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> Prompt:
        """The prompt of a row; its id is the row's name.

        Raises:
            PromptError: the row cannot become one.
        """
        part, own_place = self._find(place)
        name = part.name(own_place)
        row = self.task_row(place)
        try:
            text, token_ids = self._renderer.render(row.prompt)
        except ValueError as error:
            raise PromptError(f"{name}: {error}", name) from error
        if not token_ids:
            raise PromptError(f"{name}: the prompt has no tokens", name)
        return Prompt(
            prompt_id=name,
            text=text,
            token_ids=tuple(cut(token_ids, longest=self._longest, truncation=self._truncation)),
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra_info=row.extra_info,
        )

    def name(self, place: int) -> str:
        """Where this row is, for people."""
        part, own_place = self._find(place)
        return part.name(own_place)

    def task_row(self, place: int) -> TaskRow:
        """What the row says, neither rendered nor tokenised.

        Raises:
            PromptError: it is not in verl's schema.
        """
        part, own_place = self._find(place)
        try:
            return parse_row(part.row(own_place), self._prompt_key)
        except ValueError as error:
            name = part.name(own_place)
            raise PromptError(f"{name}: {error}", name) from error

    def _find(self, place: int) -> tuple[Rows, int]:
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = bisect_right(self._ends, place)
        return self._parts[number], place - (self._ends[number - 1] if number else 0)


def cut(token_ids: Sequence[int], *, longest: int, truncation: Truncation) -> Sequence[int]:
    """At most `longest` tokens with `truncation` left (its beginning is lost) or right (its end is), else as it is."""
    if truncation == "left":
        return token_ids[-longest:]
    return token_ids[:longest] if truncation == "right" else token_ids


def check(
    rows: PromptRows,
    *,
    longest: int,
    truncation: Truncation,
    whole: int,
    rendered: int,
    extra_info: Sequence[str] = (),
) -> None:
    """Refuse what can be found soon: the schema of the first `whole` rows, and the prompts of the first `rendered`.
    `extra_info` has the fields of it that the rewards need.

    Raises:
        ConfigError: a bad row, or with `truncation` error one that is longer than `longest` tokens; it is named. With
            `truncation` filter, all of them are longer.
    """
    try:
        for place in range(min(whole, len(rows))):
            found = rows.task_row(place).extra_info
            for field in extra_info:
                if field not in found:
                    raise ConfigError(f"{rows.name(place)}: has no extra_info.{field}, which the reward needs")
        lengths = [_checked_length(rows[place], longest, truncation) for place in range(min(rendered, len(rows)))]
        if lengths and min(lengths) > longest:
            raise ConfigError(
                f"data.max_prompt_length: all of the {len(lengths)} prompts that begin with {rows.name(0)} have more "
                f"than {longest} tokens, the shortest {min(lengths)}; raise it, or set data.truncation to left or right"
            )
    except PromptError as error:
        raise ConfigError(error.message) from error


def _checked_length(prompt: Prompt, longest: int, truncation: Truncation) -> int:
    refuse_longer(prompt, longest=longest, truncation=truncation)
    return len(prompt.token_ids)


def refuse_longer(prompt: Prompt, *, longest: int, truncation: Truncation) -> None:
    """With `truncation` error, refuse a prompt of more than `longest` tokens.

    Raises:
        ConfigError: it is longer.
    """
    if truncation == "error" and len(prompt.token_ids) > longest:
        raise ConfigError(
            f"data.max_prompt_length: {prompt.prompt_id} has {len(prompt.token_ids)} tokens, more than {longest}; "
            "raise it, or set data.truncation to left, right or filter"
        )
