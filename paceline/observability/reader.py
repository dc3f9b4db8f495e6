"""Reads `events.jsonl`: whole, or growing.

Law: only complete lines count; what stands after the last newline is left for the next read. A line that is no JSON
(cut by a full disk) is skipped and named in `damaged`; one that is JSON but no event of the schema is an error that
names it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.events import AnyEvent


class EventLogError(PacelineError):
    """A line of the log is not an event of the schema in `core.events`."""


class Record(NamedTuple):
    """One line: `t` is unix seconds, `proc` the role of the process that wrote it, `seq` rises by one per process."""

    t: float
    proc: str
    seq: int
    event: AnyEvent


class _Head(msgspec.Struct):
    t: float
    proc: str
    seq: int


def decode_line(line: bytes) -> Record:
    """One line as a record. A number that is not finite stands as null in the file and is nan here.

    Raises:
        msgspec.DecodeError: no JSON; its subclass ValidationError: JSON, but no event of the schema.
    """
    head = msgspec.json.decode(line, type=_Head)
    try:
        event = msgspec.json.decode(line, type=AnyEvent)
    except msgspec.ValidationError:
        if b"null" not in line:
            raise
        event = msgspec.convert(_nan_for_null(msgspec.json.decode(line)), type=AnyEvent, strict=False)
    return Record(head.t, head.proc, head.seq, event)


def _nan_for_null(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _nan_for_null(inner) for key, inner in value.items()}
    return value


class EventTail:
    """Follows a growing log. Each `read` returns the records that became complete since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._line = 0
        self.damaged: list[str] = []

    @classmethod
    def at_end(cls, path: Path) -> EventTail:
        """Follows what is appended from now on."""
        tail = cls(path)
        tail._offset = path.stat().st_size if path.exists() else 0
        return tail

    def read(self) -> list[Record]:
        """New records, in the order of the file; none when the file does not exist yet.

        Raises:
            EventLogError: a line is JSON but no known event.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.split(b"\n")[:-1] if (record := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Record | None:
        self._line += 1
        try:
            return decode_line(line)
        except msgspec.ValidationError as error:
            raise EventLogError(f"{self._path} line {self._line}: {error}") from error
        except msgspec.DecodeError as error:
            self.damaged.append(f"line {self._line}: {error}")
            return None


def read_events(path: Path) -> list[Record]:
    """All complete records of a log, damaged lines left out.

    Raises:
        EventLogError: a line is JSON but no known event.
    """
    return EventTail(path).read()
