"""Which configuration key a test is about. A new key without a test fails `test_all_keys`; to add one, write

    @shows("section.key")
    def test_what_it_changes() -> None: ...

in any `test_*.py` of this directory: the test has to show behaviour that differs with the key, not the stored value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from paceline.core.config import Config, build_config

F = TypeVar("F", bound=Callable[..., None])

MARK = "config_keys"


def shows(*keys: str) -> Callable[[F], F]:
    """Say that a test shows what these keys change."""

    def mark(test: F) -> F:
        setattr(test, MARK, keys)
        return test

    return mark


def shown_keys(module: ModuleType) -> set[str]:
    """Keys of all marked tests of a module."""
    return {key for name, test in vars(module).items() if name.startswith("test_") for key in getattr(test, MARK, ())}


def config_with(settings: Mapping[str, object]) -> Config:
    """The default configuration but for these dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return build_config(tree)
