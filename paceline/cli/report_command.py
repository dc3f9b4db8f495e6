"""`paceline report RUN_DIR`: fold the event log again, show the summary, compare it with the one that the run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from paceline.core.errors import ConfigError, PacelineError
from paceline.observability.reader import EventTail
from paceline.observability.summary import encode_summary, fold_summary
from paceline.observability.summary_table import summary_table


def report(run_dir: Path) -> int:
    """Print the summary; 1 when `summary.json` says something else than the log, or the ledger does not add up.

    Raises:
        ConfigError: there is no run in this directory.
        EventLogError: the log has a line that is no event.
    """
    events = run_dir / "events.jsonl"
    if not events.is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {events}")
    tail = EventTail(events)
    summary = fold_summary(tail.read())
    console = Console(highlight=False, soft_wrap=not Console().is_terminal)
    console.print(summary_table(summary, str(run_dir)))
    for damage in tail.damaged:
        print(f"damaged: {damage}")
    differences = _differences(run_dir / "summary.json", summary)
    for difference in differences:
        print(difference)
    return 1 if differences or summary["ledger_errors"] else 0


def _differences(file: Path, summary: dict[str, Any]) -> list[str]:
    if not file.is_file():
        return [] if summary["outcome"] is None else [f"the run is over, but there is no {file}"]
    try:
        written = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise PacelineError(f"cannot read {file}: {error}") from error
    folded = msgspec.json.decode(encode_summary(summary), type=dict[str, Any])
    names = [name for name in dict.fromkeys([*folded, *written]) if folded.get(name) != written.get(name)]
    return [f"summary.json differs in {name}: {written.get(name)}, the log says {folded.get(name)}" for name in names]
