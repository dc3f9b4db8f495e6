"""Measured version lag beside the predicted one, and drops by response length, on logs computed by hand."""

from __future__ import annotations

import io

from rich.console import Console

from paceline.core.events import (
    AnyEvent,
    RunResumed,
    RunStarted,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    SampleTrained,
    SyncCaptured,
)
from paceline.core.version import Version
from paceline.observability.reader import Record
from paceline.observability.summary import fold_summary
from paceline.observability.summary_table import summary_table


def started(life: int) -> RunStarted:
    return RunStarted(run_id="r", life=life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=0)


def captured(n: int, life: int = 1) -> SyncCaptured:
    return SyncCaptured(version=Version(life, n).packed, bytes=0, digest="", seconds=0.0, wait_seconds=0.0)


def admitted(*numbers: int, life: int = 1) -> SampleAdmitted:
    return SampleAdmitted(ids=[f"{life}-{number}" for number in numbers])


def trained(step: int, n: int, lags: dict[int, int], *ids: str, life: int = 1) -> SampleTrained:
    return SampleTrained(ids=list(ids), step=step, version=Version(life, n).packed, lags=lags)


def log(*events: AnyEvent) -> list[Record]:
    return [Record(float(t), "all", t, event) for t, event in enumerate(events)]


# Threshold 1/2 with 2 samples per version: a window of 3, of which 1 is left at each capture.
SATURATED = (
    started(1),
    captured(0),
    admitted(1, 2, 3),
    trained(1, 0, {0: 2}, "1-1", "1-2"),
    captured(1),  # 1-3
    admitted(4, 5),
    trained(2, 1, {1: 1, 0: 1}, "1-3", "1-4"),
    captured(2),  # 1-5
    admitted(6, 7),
    trained(3, 2, {1: 1, 0: 1}, "1-5", "1-6"),
    captured(3),  # 1-7
)


def test_the_prediction_is_what_is_outstanding_at_the_captures_per_trained_sample() -> None:
    lag = fold_summary(log(*SATURATED))["version_lag"]
    assert lag["predicted_mean"] == 3 / 6
    assert lag["mean"] == 2 / 6  # the last one is still on its way


def test_what_ends_without_being_trained_is_outstanding_until_it_ends() -> None:
    events = (
        started(1),
        captured(0),
        admitted(1, 2, 3, 4),
        trained(1, 0, {0: 1}, "1-1"),
        captured(1),  # 1-2, 1-3, 1-4
        SampleDropped(ids=["1-2"], reason="max_version_lag"),
        SampleFailed(ids=["1-3"], error="e"),
        trained(2, 1, {1: 1}, "1-4"),
        captured(2),  # none
    )
    assert fold_summary(log(*events))["version_lag"]["predicted_mean"] == 3 / 2


def test_only_the_surviving_lineage_counts() -> None:
    resumed = RunResumed(from_life=1, step=1, version=Version(1, 1).packed, admitted=3, restored=["1-3"], refused=[])
    events = (
        *SATURATED[:-1],  # of these the first update, and the capture of version 1, survive
        started(2),
        resumed,
        captured(1, life=2),  # the same weights again: no capture that anything waited across
        admitted(4, 5, life=2),
        trained(2, 1, {1: 1, 0: 1}, "1-3", "2-4", life=2),
        captured(2, life=2),  # 2-5
    )
    lag = fold_summary(log(*events))["version_lag"]
    assert lag["predicted_mean"] == (1 + 1) / (2 + 2)
    assert lag["mean"] == 1 / 4


def test_nothing_is_predicted_of_nothing() -> None:
    assert fold_summary(log(started(1), captured(0)))["version_lag"]["predicted_mean"] is None


def test_drops_are_shown_by_reason_and_response_length() -> None:
    drops = (
        SampleDropped(ids=["1-1"], reason="max_version_lag", lengths={1: 1, 3: 1}),
        SampleDropped(ids=["1-2", "1-3"], reason="max_version_lag", lengths={2: 1, 3: 2, 9: 1}),
        SampleDropped(ids=["1-4"], reason="zero_variance", lengths={0: 2}),
    )
    summary = fold_summary(log(started(1), admitted(1, 2, 3, 4), *drops))
    assert summary["dropped_response_lengths"] == {
        "max_version_lag": {1: 1, 2: 1, 3: 3, 9: 1},
        "zero_variance": {0: 2},
    }
    assert summary["samples"]["dropped"] == {"max_version_lag": 3, "zero_variance": 1}
    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(summary_table(summary, "runs/a"))
    shown = " ".join(capture.get().split())
    assert "max_version_lag responses of 1: 1, 2-3: 4, 8-15: 1 tokens" in shown
    assert "zero_variance responses of 0: 2 tokens" in shown
