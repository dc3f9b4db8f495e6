"""Every key of the configuration in words: its type, its default and what it means, as the sections declare them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic.fields import FieldInfo

from paceline.core.config import Config
from paceline.core.sections.section import Section

BOUNDS: Final = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


class KeyDescription(NamedTuple):
    """Example: `KeyDescription("rollout.n", "int, >= 1", "8", "Responses per prompt.")`."""

    key: str
    type: str
    default: str
    meaning: str


def describe_keys() -> list[KeyDescription]:
    """All keys, section by section, in the order of the source."""
    return list(_described(Config, ""))


def matching_keys(pattern: str) -> list[KeyDescription]:
    """Keys whose name, type or meaning holds every word of the pattern, in any case; all for an empty pattern."""
    words = pattern.lower().split()
    return [row for row in describe_keys() if all(word in " ".join(row).lower() for word in words)]


def _described(section: type[Section], prefix: str) -> Iterator[KeyDescription]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _described(kind, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            yield KeyDescription(f"{prefix}{name}", _type(field), in_words(default), field.description or "")


def _type(field: FieldInfo) -> str:
    limits = [
        f"{sign} {in_words(getattr(limit, name))}"
        for limit in field.metadata
        for name, sign in BOUNDS
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin is tuple:
        members = [argument for argument in arguments if argument is not Ellipsis]
        if Ellipsis in arguments:
            return f"list of {_kind(members[0])}"
        return f"list of {len(members)} {_kind(members[0])}"
    if origin is dict:
        return "mapping"
    return "none" if kind is types.NoneType else str(kind.__name__)


def in_words(value: Any) -> str:
    """A value as YAML would have it on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {in_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(in_words(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
