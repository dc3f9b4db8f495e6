"""Rows of a reasoning-gym data set: problems that are made when they are asked for, each from its own seed.

A data set is named `reasoning_gym:NAME?parameter=value&...` with the parameters of its configuration; values are JSON
where they can be, else text. `system_prompt` is one more: the name of one of reasoning-gym's system prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from paceline.core.errors import ConfigError

PREFIX = "reasoning_gym:"
DEFAULT_SIZE = 1_000_000
EXTRA_INFO = ("dataset", "parameters", "index")  # what makes a problem again, for its scorer
# Problem i is made from seed + i: data sets with fewer problems than this share no problem's seed.
VALIDATION_SEED = 1_000_000_007


class GymSpec(NamedTuple):
    """A parsed name. Example: `GymSpec("chain_sum", {"max_terms": 3}, None)`."""

    name: str
    parameters: dict[str, Any]
    system_prompt: str | None


def parse_spec(text: str) -> GymSpec:
    """The parts of `reasoning_gym:NAME?parameter=value&...`.

    Raises:
        ConfigError: it is not of this form.
    """
    name, question, query = text.removeprefix(PREFIX).partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(question))
    except ValueError as error:
        raise ConfigError(f"{text}: what follows the ? is not of the form parameter=value&parameter=value") from error
    parameters = {key: _value(value) for key, value in pairs}
    system_prompt = parameters.pop("system_prompt", None)
    return GymSpec(name, parameters, None if system_prompt is None else str(system_prompt))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def make_dataset(name: str, parameters: Mapping[str, Any]) -> Any:
    """The data set of reasoning-gym.

    Raises:
        ConfigError: it knows no such data set, or the parameters are not its own.
    """
    import reasoning_gym  # takes a second, for sympy
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, list(DATASETS), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{PREFIX}{name}: reasoning-gym has no such data set{hint}")
    try:
        return reasoning_gym.create_dataset(name, **parameters)
    except Exception as error:  # each data set checks its parameters in its own way: assert, ValueError, TypeError
        raise ConfigError(f"{PREFIX}{name}: {' '.join(str(error).split()) or type(error).__name__}") from error


class GymRows:
    """Implements `Rows` for one data set; `seed` and `size` count where the name does not say them.

    Raises:
        ConfigError: as `parse_spec` and `make_dataset`.
    """

    def __init__(self, text: str, *, prompt_key: str, chat: bool, seed: int, size: int = DEFAULT_SIZE) -> None:
        self._spec = parse_spec(text)
        self._parameters = {"seed": seed, "size": size, **self._spec.parameters}
        self._dataset = make_dataset(self._spec.name, self._parameters)
        self._system = _system_prompt(self._spec.system_prompt)
        self._prompt_key = prompt_key
        self._chat = chat

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, place: int) -> str:
        """Data set and problem."""
        return f"{PREFIX}{self._spec.name}:{place}"

    def row(self, place: int) -> Mapping[str, Any]:
        """The problem in verl's schema; `extra_info` has what makes it again. Raises ValueError: it cannot be made."""
        try:
            entry = self._dataset[place]
        except Exception as error:  # a generator may fail in any way for one seed; its problem is refused
            raise ValueError(f"cannot be made: {type(error).__name__}: {error}") from error
        system = [{"role": "system", "content": self._system}] if self._system else []
        chat = [*system, {"role": "user", "content": entry["question"]}]
        return {
            self._prompt_key: chat if self._chat else "\n".join(message["content"] for message in chat),
            "data_source": f"reasoning_gym/{self._spec.name}",
            "reward_model": {"ground_truth": entry["answer"]},
            "extra_info": dict(zip(EXTRA_INFO, (self._spec.name, self._parameters, place), strict=True)),
        }


def _system_prompt(name: str | None) -> str:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name is None:
        return ""
    if name not in SYSTEM_PROMPTS:
        raise ConfigError(f"system_prompt={name}: reasoning-gym has {', '.join(SYSTEM_PROMPTS)}")
    return str(SYSTEM_PROMPTS[name])
