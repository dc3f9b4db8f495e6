"""Draws the live display from a recorded run as an SVG, for the README.

python scripts/render_display.py RUN_DIR/events.jsonl [--at 0.6] [--width 96] [--out docs/images/display.svg]
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from paceline.core.events import RunFinished, TrainStep
from paceline.observability.console import ProgressView
from paceline.observability.progress import Progress
from paceline.observability.reader import Record, read_events

DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "display.svg"
HEIGHT = 40
# The picture must not fetch a font from elsewhere: the viewer's own monospace does.
FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def progress_at(records: list[Record], share: float) -> Progress:
    """The display's state when this share of the updates was done."""
    steps = sum(isinstance(record.event, TrainStep) for record in records)
    progress = Progress()
    done = 0
    for record in sorted(records, key=lambda record: record.t):
        if isinstance(record.event, RunFinished) or (steps and done > share * steps):
            break
        progress.feed(record)
        done += isinstance(record.event, TrainStep)
    return progress


def render_svg(progress: Progress, width: int) -> str:
    """The display as an SVG document."""
    console = Console(
        record=True, file=io.StringIO(), width=width, height=HEIGHT, force_terminal=True, legacy_windows=False
    )
    console.print(ProgressView(progress, progress.now))
    svg = console.export_svg(title="paceline train", code_format=FORMAT, unique_id="paceline-display")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("events", type=Path, help="events.jsonl of a run")
    parser.add_argument("--at", type=float, default=0.6, help="share of the updates that is done in the picture")
    parser.add_argument("--width", type=int, default=96, help="columns")
    parser.add_argument("--out", type=Path, default=DEFAULT_TARGET)
    chosen = parser.parse_args()
    svg = render_svg(progress_at(read_events(chosen.events), chosen.at), chosen.width)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(svg, encoding="utf-8")
    print(f"wrote {chosen.out}")


if __name__ == "__main__":
    main()
