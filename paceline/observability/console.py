"""The live display on a terminal, and the summary when it is over.

A thread of `rich` redraws it twice a second, so that waits and clocks move even while no record comes; the lock
keeps it from drawing a half-applied record. What does not fit the height of the terminal is left out, the least
important first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table

from paceline.observability import panels
from paceline.observability.progress import Progress
from paceline.observability.reader import Record
from paceline.observability.summary_table import summary_table

REDRAWS_PER_SECOND = 2
TWO_COLUMNS = 80


class ProgressView:
    """A picture of `progress` at the time `now`, made for the size of the console that draws it."""

    def __init__(self, progress: Progress, now: float) -> None:
        self._progress = progress
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sections = self._sections(options.max_width)
        lines = {rank: console.render_lines(part, options, pad=False) for rank, part in sections}
        room = max(3, options.size.height - 1)
        while len(lines) > 1 and sum(len(part) for part in lines.values()) > room:
            del lines[max(lines)]
        for rank, part in sections:
            if rank in lines:
                yield part

    def _sections(self, width: int) -> list[tuple[int, RenderableType]]:
        """Sections from top to bottom, each with its rank: the highest rank is left out first."""
        progress, now = self._progress, self._now
        notices, sample = panels.notices(progress, now), panels.shown_sample(progress)
        sections: list[tuple[int, RenderableType]] = [(0, panels.header(progress, now))]
        if not progress.steps:
            sections.append((2, panels.startup(progress, now)))
        else:
            sections.extend(self._figures(width))
        if sample is not None:
            sections.append((5, sample))
        if notices is not None:
            sections.append((1, notices))
        if progress.steps:
            sections.append((6, panels.processes(progress)))
        return sections

    def _figures(self, width: int) -> list[tuple[int, RenderableType]]:
        progress, now = self._progress, self._now
        weights = panels.weights(progress, now)
        if width < TWO_COLUMNS:
            return [(2, panels.learning(progress, width)), (3, panels.pace(progress, now, width)), (4, weights)]
        left = width // 2
        grid = Table.grid(expand=True)
        grid.add_column(width=left)
        grid.add_column(width=width - left)
        grid.add_row(panels.learning(progress, left), panels.pace(progress, now, width - left))
        return [(2, grid), (4, weights)]


class ConsoleDisplay:
    """A `Display` on a terminal. `wall` gives unix seconds."""

    def __init__(self, stream: TextIO, run_dir: Path, wall: Callable[[], float]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._run_dir = run_dir
        self._wall = wall
        self._progress = Progress()
        self._lock = threading.Lock()
        self._live = Live(
            console=self._console,
            get_renderable=self._view,
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
        )

    def start(self) -> None:
        self._live.start()

    def feed(self, records: Iterable[Record]) -> None:
        with self._lock:
            self._progress.feed_all(records)

    def stop(self, summary: Mapping[str, Any]) -> None:
        self._live.stop()
        if summary:
            self._console.print(summary_table(summary, str(self._run_dir)))

    def _view(self) -> RenderableType:
        with self._lock:
            options = self._console.options
            lines = self._console.render_lines(ProgressView(self._progress, self._wall()), options, pad=False)
        # Drawn already: no lock is held while the terminal takes the lines.
        return SegmentLines(lines, new_lines=True)
