"""The event log of one process: every process of a run appends its own events to the one `events.jsonl`.

Law: an event is one line: `t` (unix seconds), `proc`, `seq`, then `kind` and the fields. It is handed to the kernel
before `emit` returns, so `kill -9` of the process loses nothing that was emitted. An event that cannot be written is
counted, and shows to readers as a gap in `seq`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.core.events import Event
from paceline.observability.append_file import AppendFile

logger = logging.getLogger(__name__)


class EventLog:
    """An `EventSink` on a file. `proc` is the role of the process, `wall` gives unix seconds. Safe in any thread."""

    def __init__(self, path: Path, proc: str, wall: Callable[[], float]) -> None:
        self._file = AppendFile(path)
        self._proc = msgspec.json.encode(proc)
        self._wall = wall
        self._lock = threading.Lock()
        self._seq = 0
        self._unencodable = 0

    def emit(self, event: Event) -> None:
        """Append one event. Never raises."""
        with self._lock:
            seq = self._seq
            self._seq += 1
            head = b'{"t":%.6f,"proc":%b,"seq":%d,' % (self._wall(), self._proc, seq)
            try:
                body = msgspec.json.encode(event)
            except (TypeError, ValueError, OverflowError) as error:
                self._report(event, error)
                return
            self._file.append(head + body[1:] + b"\n")

    @property
    def lost(self) -> int:
        """Events that did not reach the file."""
        return self._unencodable + self._file.errors

    def close(self) -> None:
        """Close the file; events emitted later are not recorded."""
        self._file.close()

    def _report(self, event: Event, error: Exception) -> None:
        self._unencodable += 1
        if self._unencodable == 1:
            logger.warning("cannot record an event of kind %s: %s (said once)", type(event).__name__, error)
