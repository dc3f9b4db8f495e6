"""The written schema is the one of the source."""

from __future__ import annotations

import typing

from paceline.core import events
from scripts.make_event_docs import TARGET, render


def test_the_page_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run python scripts/make_event_docs.py"


def test_every_event_is_in_the_union() -> None:
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)}
    assert kinds - {events.Event} == set(typing.get_args(events.AnyEvent))
