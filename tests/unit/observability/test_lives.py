"""The summary and the plain lines of a run of two lives."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from paceline.core.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    RunFinished,
    RunResumed,
    RunStarted,
    SampleAdmitted,
    SampleTrained,
    TrainStep,
)
from paceline.core.version import Version
from paceline.observability.plain_lines import PlainLines
from paceline.observability.reader import EventTail, Record
from paceline.observability.summary import fold_summary, number_ranges

V1 = Version(1, 1).packed


def started(life: int, command_wall: float) -> RunStarted:
    return RunStarted(run_id="r", life=life, seed=0, cores=1, threads={}, command_wall=command_wall, total_steps=3)


def update(step: int, wait_seconds: float = 0.0) -> TrainStep:
    return TrainStep(
        step=step,
        version=V1,
        seconds=1.0,
        wait_seconds=wait_seconds,
        reward_mean=0.1 * step,
        response_length_mean=1.0,
        sequences=1,
        tokens=1,
        metrics={},
    )


def trained(step: int, lag: int, *ids: str) -> SampleTrained:
    return SampleTrained(ids=list(ids), step=step, version=V1, lags={lag: 1})


SAVED = CheckpointSaved(step=1, version=V1, seconds=0.25, bytes=1000, open_samples=2)
RESUMED = RunResumed(
    from_life=1, step=1, version=V1, admitted=3, restored=["1-2", "1-3"], refused=["global_step_2: torn"]
)
RUN: list[tuple[float, str, Event]] = [
    (10.0, "driver", started(1, 5.0)),
    (10.5, "rollouter", SampleAdmitted(ids=["1-1", "1-2", "1-3", "1-4", "1-5"])),
    (12.0, "trainer", trained(1, 0, "1-1")),
    (12.0, "trainer", update(1)),
    (12.3, "trainer", SAVED),
    (12.4, "trainer", CheckpointFailed(step=2, error="No space left on device")),
    (16.0, "trainer", trained(2, 7, "1-4")),
    (16.0, "trainer", update(2, wait_seconds=3.0)),
    (20.0, "driver", RunFinished(outcome="interrupted", error="x", exit_code=143)),
    (30.0, "driver", started(2, 28.0)),
    (30.1, "driver", RESUMED),
    (40.0, "trainer", trained(2, 1, "1-2")),
    (40.0, "trainer", update(2)),
    (41.0, "trainer", trained(3, 1, "1-3")),
    (41.0, "trainer", update(3)),
]


def records(events: list[tuple[float, str, Event]]) -> list[Record]:
    return [Record(t, proc, 0, event) for t, proc, event in events]  # type: ignore[arg-type]


def test_the_summary_is_of_the_surviving_lineage_and_names_what_is_lost() -> None:
    summary = fold_summary(records(RUN))
    assert (summary["lives"], summary["steps"], summary["outcome"]) == (2, 3, None)
    assert summary["samples"] == {"admitted": 5, "trained": 3, "dropped": {"lost_lineage": 2}, "failed": 0, "open": 0}
    assert summary["lost_lineage"] == {"samples": 2, "updates": 1, "ids": ["1-4..5"]}
    assert summary["version_lag"]["max"] == 1
    assert summary["train_seconds"] == pytest.approx(5.0 + 2.0)
    assert summary["startup_seconds"] == pytest.approx(39.0 - 28.0)
    assert summary["trainer_idle_ratio"] == pytest.approx(3.0 / 7.0)
    assert summary["checkpoints"] == {
        "saved_count": 1,
        "failed_count": 1,
        "bytes": 1000,
        "seconds_p50": 0.25,
        "seconds_max": 0.25,
    }
    assert summary["ledger_errors"] == []


def test_the_outcome_is_that_of_the_last_life() -> None:
    finished = (42.0, "driver", RunFinished(outcome="completed", error="", exit_code=0))
    assert fold_summary(records([*RUN, finished]))["outcome"] == "completed"


def test_ids_are_written_as_ranges() -> None:
    assert number_ranges(["2-5", "1-4", "1-5", "1-10", "2-6", "2-7"]) == ["1-4..5", "1-10", "2-5..7"]
    assert number_ranges([]) == []


def test_plain_lines_tell_of_checkpoints(tmp_path: Path) -> None:
    stream = io.StringIO()
    PlainLines(stream, tmp_path).feed(records(RUN))
    lines = stream.getvalue().splitlines()
    assert "checkpoint step=1 seconds=0.250 bytes=1000 version=1.1" in lines
    assert 'checkpoint_error step=2 error="No space left on device"' in lines
    assert 'resumed from_life=1 step=1 version=1.1 samples_on_their_way=2 refused="global_step_2: torn"' in lines


def test_displays_of_a_resumed_run_begin_with_its_own_life(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert EventTail.at_end(path).read() == []
    path.write_bytes(b'{"t":1.0,"proc":"a","seq":0,"kind":"queue.level","size":1,"capacity":2}\n')
    tail = EventTail.at_end(path)
    with path.open("ab") as file:
        file.write(b'{"t":2.0,"proc":"a","seq":1,"kind":"queue.level","size":2,"capacity":2}\n')
    assert [record.t for record in tail.read()] == [2.0]
