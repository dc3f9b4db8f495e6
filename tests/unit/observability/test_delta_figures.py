"""What a person sees of a sync that sent a delta: changed share, bytes, reduction, seconds of encoding."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from paceline.core.events import AnyEvent, SyncCompleted
from paceline.observability.figures import reduction_text, share_text
from paceline.observability.panels import weights
from paceline.observability.plain_lines import PlainLines
from paceline.observability.progress import Progress
from paceline.observability.summary import fold_summary
from paceline.observability.summary_table import summary_table
from tests.unit.observability.made_run import finish, records, startup, step, version

SPARSE = SyncCompleted(
    version=version(2),
    mode="delta",
    bytes=410_000,
    seconds=0.2,
    phases={"capture": 0.05, "encode": 0.12, "stage": 0.1, "swap": 0.05},
    pauses={"replica-0": 0.003},
    fenced=[],
    verified=True,
    base_version=version(1),
    full_bytes=269_000_000,
    changed_share=0.0032,
    encode_seconds=0.118,
)
DENSE = SyncCompleted(
    version=version(2),
    mode="full",
    bytes=1_200_000,
    seconds=0.2,
    phases={},
    pauses={},
    fenced=[],
    verified=True,
    full_bytes=1_200_000,
    changed_share=0.83,
    encode_seconds=0.002,
)


def run(sync: SyncCompleted) -> list[tuple[float, str, AnyEvent]]:
    return [*startup(), (10.0, "synchronizer", sync), *step(11.0, 1, 2), *finish(20.0)]


def panel(sync: SyncCompleted) -> str:
    progress = Progress()
    progress.feed_all(records(*run(sync)))
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as capture:
        console.print(weights(progress, 12.0))
    return " ".join(capture.get().split())


def test_the_display_shows_what_a_delta_saved() -> None:
    shown = panel(SPARSE)
    assert "delta 410.0 kB" in shown
    assert "changed 0.32 % compared in 118 ms against 1.1 656x fewer bytes" in shown


def test_the_display_shows_why_a_version_went_in_full() -> None:
    shown = panel(DENSE)
    assert "full 1.2 MB" in shown
    assert "changed 83 % compared in 2.0 ms" in shown
    assert "fewer bytes" not in shown


def test_a_log_line_has_the_figures(tmp_path: Path) -> None:
    stream = io.StringIO()
    lines = PlainLines(stream, tmp_path, steps_between=1)
    lines.feed(records(*run(SPARSE)))
    assert "sync_mode=delta sync_bytes=410000 sync_full_bytes=269000000 sync_changed=0.003200 encode_seconds=0.118" in (
        stream.getvalue()
    )


def test_the_summary_counts_deltas() -> None:
    summary = fold_summary(records(*run(SPARSE)))
    assert summary["syncs"]["delta_count"] == 1
    assert summary["syncs"]["changed_share_p50"] == pytest.approx(0.0032)
    assert summary["syncs"]["encode_seconds_p50"] == pytest.approx(0.118)
    console = Console(file=io.StringIO(), width=140, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(summary, "runs/a"))
    assert "410.0 kB (1 deltas; 269.0 MB in full)" in " ".join(capture.get().split())


def test_shares_and_reductions_are_short() -> None:
    assert [share_text(share) for share in (0.0, 0.52, 0.0116, 0.0031, 0.00004)] == [
        "0 %",
        "52 %",
        "1.2 %",
        "0.31 %",
        "4.0e-03 %",
    ]
    assert [reduction_text(*pair) for pair in ((1000, 8), (10, 4), (5, 0))] == ["125x", "2.5x", "-"]
