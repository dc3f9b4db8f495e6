"""A row in verl's schema: `prompt`, `data_source`, `reward_model.ground_truth`, `extra_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

Message = dict[str, str]


class TaskRow(NamedTuple):
    """What a row says. `prompt` is a chat (messages with role and content) or a text that is used as it is.

    Example: `TaskRow([{"role": "user", "content": "2+2?"}], "sums", "4", {"index": 0})`.
    """

    prompt: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def columns(prompt_key: str) -> list[str]:
    """The fields that are read."""
    return [prompt_key, "data_source", "reward_model", "extra_info"]


def parse_row(row: Mapping[str, Any], prompt_key: str) -> TaskRow:
    """The row, checked.

    Raises:
        ValueError: what is missing or of another kind.
    """
    if row.get(prompt_key) is None:
        known = ", ".join(sorted(row)) or "nothing"
        raise ValueError(f"has no {prompt_key!r} (data.prompt_key names the field; the row has {known})")
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        raise ValueError("has no data_source that is a text")
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError("has no reward_model.ground_truth (null is one, for a reward that needs none)")
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, Mapping | None):
        raise ValueError(f"extra_info is {type(extra_info).__name__}, not an object")
    prompt = _prompt(row[prompt_key], prompt_key)
    for_reward = (reward_model["ground_truth"], dict(extra_info or {}))
    try:
        msgspec.msgpack.encode(for_reward)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"ground_truth or extra_info holds what cannot be handed on: {error}") from error
    return TaskRow(prompt, source, *for_reward)


def _prompt(value: object, key: str) -> list[Message] | str:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{key!r} is empty")
        return value
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise ValueError(f"{key!r} is neither a text nor a list of messages")
    return [_message(one, key) for one in value]


def _message(one: object, key: str) -> Message:
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
        raise ValueError(f"{key!r} has a message without a role and a content that are texts")
    return {str(name): value for name, value in one.items() if value is not None}
