"""What shows a run while it lasts: one protocol, and the choice between a terminal and a stream.

The driver of a run calls `start`, then `feed` with the new records of the log, as often as it likes, and `stop` once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from paceline.observability.reader import Record


class Display(Protocol):
    """Something that shows a run to people. No method waits for long, none influences the run."""

    def start(self) -> None:
        """Begin to show; before the first record."""
        ...

    def feed(self, records: Iterable[Record]) -> None:
        """Take new records; an empty call is allowed."""
        ...

    def stop(self, summary: Mapping[str, Any]) -> None:
        """Show how the run ended (`summary.fold_summary`; empty: nothing is shown) and give the terminal back."""
        ...


def open_display(stream: TextIO, run_dir: Path, wall: Callable[[], float]) -> Display:
    """The live display when `stream` is a terminal that can draw it, else plain lines."""
    if stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8":
        from paceline.observability.console import ConsoleDisplay

        return ConsoleDisplay(stream, run_dir, wall)
    from paceline.observability.plain_lines import PlainLines

    return PlainLines(stream, run_dir)
