"""Rows of a JSONL file: memory-mapped, with the offset of every line (8 bytes a row). Blank lines are no rows."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError

SCANNED_AT_ONCE = 1 << 24  # bytes
NEWLINE = 10


class JsonlRows:
    """Implements `Rows`. Line numbers begin at 1, as editors count.

    Raises:
        ConfigError: the file cannot be read, or has no row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
        self._newlines = _newlines(self._data)
        self._lines = _lines_with_text(self._newlines)
        if not len(self):
            raise ConfigError(f"{path}: has no rows")

    def __len__(self) -> int:
        return len(self._newlines) - 1 if self._lines is None else len(self._lines)

    def name(self, place: int) -> str:
        """File and line."""
        return f"{self._path}:{self._line(place) + 1}"

    def row(self, place: int) -> Mapping[str, Any]:
        """The row. Raises ValueError: it is no JSON object."""
        line = self._line(place)
        text = self._data[self._newlines[line] + 1 : self._newlines[line + 1]]
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"is no JSON object on a line of its own: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"is {type(row).__name__}, not a JSON object")
        return row

    def _line(self, place: int) -> int:
        return place if self._lines is None else int(self._lines[place])


def _newlines(data: mmap.mmap | bytes) -> npt.NDArray[np.int64]:
    """Where lines end, with -1 before the first; the end of a text whose last line has no end of its own counts."""
    view = np.frombuffer(data, dtype=np.uint8)
    found = [
        np.flatnonzero(view[begin : begin + SCANNED_AT_ONCE] == NEWLINE) + begin
        for begin in range(0, len(view), SCANNED_AT_ONCE)
    ]
    unended = [len(view)] if len(view) and view[-1] != NEWLINE else []
    return np.concatenate([np.array([-1]), *found, np.array(unended, dtype=np.int64)])


def _lines_with_text(newlines: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Lines that are not blank; None where none is. One byte is no JSON object: it is what CR LF leaves of nothing."""
    with_text = np.diff(newlines) > 2
    return None if with_text.all() else np.flatnonzero(with_text)
