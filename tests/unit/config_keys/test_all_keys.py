"""Every configuration key has a test here that shows what it changes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from paceline.core.config import known_keys
from tests.unit.config_keys.keys import shown_keys

HERE = Path(__file__)


def test_every_key_has_a_test_and_every_tested_key_exists() -> None:
    names = [f"tests.unit.config_keys.{file.stem}" for file in HERE.parent.glob("test_*.py") if file != HERE]
    shown = set().union(*(shown_keys(import_module(name)) for name in names))
    assert sorted(known_keys().keys() - shown) == [], "keys without a test; see keys.py"
    assert sorted(shown - known_keys().keys()) == [], "tests of keys that do not exist"
