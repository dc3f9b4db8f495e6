"""Training prompts in a seeded order without end, and the validation prompts.

Law: the order is a function of (seed, epoch) alone, so a cursor of two numbers restores the place; every prompt comes
once an epoch, under an id that no other epoch uses. Neither the order nor the prompts are ever written down: a prompt
is made when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.permutation import SeededPermutation
from paceline.core.sample import Prompt


class Prompts(Protocol):
    """Prompts by place, 0 to len - 1, each with an id of its own; a tuple is one, and so is what reads a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Prompt:
        """Raises PromptError: there is no usable prompt at this place."""
        ...


class DatasetCursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a data set stands: `position` prompts of `epoch` have been given. `seed` and `size` say of which data set.

    Example: `DatasetCursor(epoch=2, position=17, seed=0, size=5000)`.
    """

    epoch: int
    position: int
    seed: int
    size: int


class PromptDataset:
    """Implements `core.ports.PromptSource`.

    Raises:
        ConfigError: no training prompts.
    """

    def __init__(self, *, train: Prompts, validation: Sequence[Prompt], seed: int) -> None:
        if not len(train):
            raise ConfigError("data: there are no training prompts")
        self._train = train
        self._validation = tuple(validation)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def next_prompt(self) -> Prompt:
        """The next prompt; its id is "<epoch>:<prompt_id>", so it is unique over the run.

        Raises:
            PromptError: see the port.
        """
        if self._position == len(self._train):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        place = self._order[self._position]
        self._position += 1
        prompt = self._train[place]
        return msgspec.structs.replace(prompt, prompt_id=f"{self._epoch}:{prompt.prompt_id}")

    def validation_prompts(self) -> Sequence[Prompt]:
        """All validation prompts, in the given order and under the given ids."""
        return self._validation

    def state(self) -> DatasetCursor:
        """The cursor behind the last prompt that was given."""
        return DatasetCursor(self._epoch, self._position, self._seed, len(self._train))

    def restore(self, cursor: DatasetCursor) -> None:
        """Go on from `cursor`.

        Raises:
            ConfigError: the cursor belongs to a data set of another size or seed, or points outside.
        """
        if (cursor.seed, cursor.size) != (self._seed, len(self._train)):
            raise ConfigError(
                f"data: the cursor is of {cursor.size} prompts with seed {cursor.seed}, "
                f"the data set has {len(self._train)} with seed {self._seed}"
            )
        if cursor.epoch < 0 or not 0 <= cursor.position <= cursor.size:
            raise ConfigError(f"data: no such place: epoch {cursor.epoch}, position {cursor.position}")
        self._epoch, self._position = cursor.epoch, cursor.position
        self._order = self._shuffled(cursor.epoch)

    def _shuffled(self, epoch: int) -> SeededPermutation:
        return SeededPermutation(len(self._train), f"{self._seed}-{epoch}")
