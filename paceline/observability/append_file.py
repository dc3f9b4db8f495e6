"""A file that several processes append whole lines to.

Law: one `append` is one write(2) on an O_APPEND descriptor, so lines of different processes never interleave; after a
line that was cut short (disk full) the next one begins on a line of its own. Errors are counted and logged once, never
raised.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class AppendFile:
    """Appends to `path`, which is made if it is missing. The constructor raises OSError; nothing after it does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._torn = False
        self._closed = False
        self.errors = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, lines: bytes) -> bool:
        """Append whole lines; False when they could not be written."""
        with self._lock:
            if self._closed:
                return False
            try:
                self._write(lines)
            except OSError as error:
                self._report(error)
                return False
            return True

    def close(self) -> None:
        """Idempotent; later appends are refused."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)

    def _write(self, lines: bytes) -> None:
        view = memoryview(b"\n" + lines if self._torn else lines)
        written = os.write(self._descriptor, view)
        while written < len(view):
            self._torn = True
            written += os.write(self._descriptor, view[written:])
        self._torn = False

    def _report(self, error: OSError) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.warning("cannot write to %s: %s (said once)", self._path, error)
