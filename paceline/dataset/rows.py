"""Rows: a data set as a sequence of mappings in verl's schema, read one by one.

Law: opening one costs no more than an index; a row is decoded when it is asked for. Whatever is wrong with a row is a
ValueError that says what, and `name` says where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Rows(Protocol):
    """One data set. Places are 0 to len - 1."""

    def __len__(self) -> int: ...

    def name(self, place: int) -> str:
        """Where this row is, for people. Example: `"data/train.jsonl:17"`."""
        ...

    def row(self, place: int) -> Mapping[str, Any]:
        """The row. Raises ValueError: what is wrong with it."""
        ...
