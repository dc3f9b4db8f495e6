"""Keeps what libraries write to the terminal out of it.

Ray's daemons and C++ parts write to file descriptors 1 and 2 whatever their settings say, in lines on which a user
cannot act. While a run lasts, both descriptors lead to `libraries.log` of the run directory; what paceline itself
shows goes to the stream that `screen` gives.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

FILE_NAME = "libraries.log"
STANDARD = (1, 2)


class LibraryOutput:
    """A context in which descriptors 1 and 2 lead to the log; `screen` is the old descriptor 1."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._kept: dict[int, int] = {}
        self._screen: TextIO | None = None

    @property
    def screen(self) -> TextIO:
        """Where the run may show itself; as much a terminal as descriptor 1 was."""
        return self._screen or sys.stdout

    def __enter__(self) -> Self:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in STANDARD:
            self._kept[descriptor] = os.dup(descriptor)
            os.dup2(log, descriptor)
        os.close(log)
        self._screen = os.fdopen(os.dup(self._kept[1]), "w", encoding=sys.stdout.encoding, errors="replace")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._screen is not None:
            with suppress(OSError):  # whoever read it has gone
                self._screen.close()
            self._screen = None
        for descriptor, kept in self._kept.items():
            os.dup2(kept, descriptor)
            os.close(kept)
        self._kept.clear()
