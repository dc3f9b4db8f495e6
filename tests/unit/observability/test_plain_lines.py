"""Plain lines: stable keys, ASCII, no escape codes, not too many."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from paceline.core.events import (
    AnyEvent,
    RunFinished,
    SampleFailed,
    SyncAborted,
    SyncCompleted,
    ValidationSkipped,
    WaitBegan,
    WaitEnded,
)
from paceline.observability.plain_lines import PlainLines
from paceline.observability.summary import fold_summary
from tests.unit.observability.made_run import T0, records, startup, training, version, whole_run


def lines_of(*timed: tuple[float, str, AnyEvent], steps_between: int = 10) -> list[str]:
    stream = io.StringIO()
    display = PlainLines(stream, Path("runs/a"), steps_between)
    display.feed(records(*timed))
    return stream.getvalue().splitlines()


def tagged(lines: list[str], tag: str) -> list[str]:
    return [line for line in lines if line.startswith(f"{tag} ")]


def test_a_step_line_has_every_figure() -> None:
    lines = tagged(lines_of(*startup(), *training(), steps_between=4), "step")
    assert [line.split()[1] for line in lines] == ["step=1/8", "step=4/8", "step=8/8"]
    # Seven windows of each replica were over then: 5.7 s of 7 s busy.
    assert lines[1] == (
        "step step=4/8 version=1.1 reward=0.250 val_accuracy=0.410 response_length=4.000 tokens_per_second=9000 "
        "lag_mean=0.250 lag_max=1 trainer_idle=0.250 rollouter_idle=0.186 queue=2/8 admission=3/6 sync_mode=full "
        "sync_bytes=3900000 sync_seconds=0.200 pause_seconds=0.003000 elapsed=18"
    )


def test_a_line_for_every_validation_and_process() -> None:
    lines = lines_of(*startup(), *training())
    assert tagged(lines, "validation")[0] == (
        "validation version=1.0 step=0 accuracy=0.410 problems=2000 seconds=1.000"
    )
    assert len(tagged(lines, "validation")) == 3
    assert tagged(lines, "process")[0] == "process role=trainer pid=100 threads=1 seconds=3.000"
    assert tagged(lines, "run") == ["run id=arithmetic-001 life=1 seed=0 cores=2 threads=3 total_steps=8"]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            SyncAborted(version=version(3), phase="stage", error='no "answer"'),
            'sync_error version=1.3 phase=stage error="no \\"answer\\""',
        ),
        (
            SyncCompleted(
                version=version(3),
                mode="full",
                bytes=1,
                seconds=1.0,
                phases={},
                pauses={},
                fenced=["replica-0", "replica-1"],
                verified=True,
            ),
            "sync_error version=1.3 fenced=replica-0,replica-1",
        ),
        (SampleFailed(ids=["a"], error="zwei\nä"), 'sample_error samples=1 error="zwei\\n\\u00e4"'),
        (ValidationSkipped(version=version(2), reason="pin limit"), 'validation version=1.2 skipped="pin limit"'),
        (WaitBegan(who="trainer", what="samples", since_wall=T0), f"wait who=trainer what=samples since={T0:.1f}"),
        (WaitEnded(who="trainer", what="samples", seconds=2.5), "wait_over who=trainer what=samples seconds=2.500"),
    ],
)
def test_a_line_for_each_thing_of_note(event: AnyEvent, line: str) -> None:
    assert lines_of((1.0, "synchronizer", event)) == [line]


def test_the_whole_output_is_ascii_lines_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    display = PlainLines(stream, Path("runs/ä"))
    failed = RunFinished(outcome="failed", error="die Replik ist tot: ü\nx", exit_code=1)
    log = [*whole_run()[:-1], *records((29.0, "nobody", failed))]
    display.start()
    display.feed(log)
    display.stop(fold_summary(log))
    text = stream.getvalue()
    assert text.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    finished = tagged(text.splitlines(), "finished")[0]
    assert "outcome=failed" in finished
    assert "samples.dropped.shutdown=1" in finished
    assert "syncs.verified_count=5" in finished
    assert "17 admitted, 16 trained, 1 dropped (shutdown)" in text


def test_an_empty_summary_shows_nothing() -> None:
    stream = io.StringIO()
    PlainLines(stream, Path("a")).stop({})
    assert stream.getvalue() == ""
