"""The summary against values worked out by hand from the made run (see `made_run`)."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest

from paceline.core.events import (
    AnyEvent,
    GenerationWindow,
    ResponsesAborted,
    RunFinished,
    SampleAdmitted,
    SampleDropped,
    SampleTrained,
    SyncAborted,
    TrainStep,
    ValidationSkipped,
    ZombiesRefused,
)
from paceline.observability.quantiles import quantile
from paceline.observability.reader import Record
from paceline.observability.summary import encode_summary, fold_summary
from tests.unit.observability.made_run import (
    REPLICAS,
    finish,
    records,
    startup,
    step,
    sync,
    training,
    validation,
    version,
    whole_run,
    window,
)

# What issue and documentation promise to the readers of summary.json.
FIELDS = {
    "val_accuracy_first",
    "val_accuracy_last",
    "train_seconds",
    "startup_seconds",
    "versions",
    "syncs",
    "samples",
    "version_lag",
    "tokens_generated",
    "trainer_idle_ratio",
    "rollouter_idle_ratio",
    "run_id",
    "outcome",
    "exit_code",
    "error",
    "steps",
    "reward_last",
    "val_accuracy_by_version",
    "seconds_to_080",
    "ledger_errors",
}


def test_a_whole_run() -> None:
    summary = fold_summary(whole_run())
    assert set(summary) >= FIELDS
    assert (summary["run_id"], summary["outcome"], summary["exit_code"], summary["error"]) == (
        "arithmetic-001",
        "completed",
        0,
        "",
    )
    assert summary["steps"] == 8
    assert summary["versions"] == 5
    # The command began at 0 s; the first update ends at 12 s after 1.5 s of work, the last one ends at 26 s.
    assert summary["startup_seconds"] == pytest.approx(10.5)
    assert summary["train_seconds"] == pytest.approx(15.5)
    assert summary["reward_last"] == pytest.approx(0.8)
    assert summary["ledger_errors"] == []
    assert summary["lost_events"] == 0


def test_validations_of_a_whole_run() -> None:
    summary = fold_summary(whole_run())
    assert summary["val_accuracy_first"] == pytest.approx(0.41)
    assert summary["val_accuracy_last"] == pytest.approx(0.81)
    assert summary["val_accuracy_by_version"] == pytest.approx({"1.0": 0.41, "1.2": 0.61, "1.4": 0.81})
    assert list(summary["val_accuracy_by_version"]) == ["1.0", "1.2", "1.4"]
    # 0.81 is known at 27.4 s, training began at 10.5 s.
    assert summary["seconds_to_080"] == pytest.approx(16.9)


def test_syncs_of_a_whole_run() -> None:
    syncs = fold_summary(whole_run())["syncs"]
    assert syncs["count"] == 5
    assert syncs["verified_count"] == 5
    assert syncs["bytes"] == 5 * 3_900_000
    assert (syncs["seconds_p50"], syncs["seconds_p99"]) == (0.2, 0.2)
    # Five pauses of 1 ms and five of 3 ms: half of them do not exceed 1 ms.
    assert (syncs["pause_seconds_p50"], syncs["pause_seconds_p99"]) == (0.001, 0.003)


def test_samples_lag_tokens_and_idle_ratios_of_a_whole_run() -> None:
    summary = fold_summary(whole_run())
    assert summary["samples"] == {"admitted": 17, "trained": 16, "dropped": {"shutdown": 1}, "failed": 0, "open": 0}
    # At three captures the two samples of the next update are outstanding; 16 are trained.
    assert summary["version_lag"] == {"mean": pytest.approx(0.25), "p99": 1, "max": 1, "predicted_mean": 6 / 16}
    assert summary["tokens_generated"] == 8 * 2 * 2 * 4000
    assert summary["validation_tokens_generated"] == 8 * 2 * 2 * 500
    # Seven waits of 0.5 s; the one before the first update is start-up.
    assert summary["trainer_idle_ratio"] == pytest.approx(7 * 0.5 / 15.5)
    assert summary["rollouter_idle_ratio"] == pytest.approx(0.2)


def test_lines_that_cross_change_nothing() -> None:
    made = whole_run()
    by_process = sorted(made, key=lambda record: record.proc)
    assert fold_summary(by_process) == fold_summary(made)
    # Even torn out of every order, all but the gaps of `seq` stays.
    shuffled = random.Random(1).sample(made, len(made))
    assert _without_gaps(fold_summary(shuffled)) == _without_gaps(fold_summary(made))


def _without_gaps(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "lost_events"}


def test_an_empty_log() -> None:
    summary = fold_summary([])
    assert set(summary) >= FIELDS
    assert summary["outcome"] is None
    assert summary["val_accuracy_first"] is None
    assert summary["train_seconds"] is None
    assert summary["trainer_idle_ratio"] is None
    assert summary["rollouter_idle_ratio"] is None
    assert summary["version_lag"] == {"mean": None, "p99": None, "max": None, "predicted_mean": None}
    assert summary["syncs"]["count"] == 0
    assert summary["syncs"]["pause_seconds_p99"] is None
    assert summary["samples"] == {"admitted": 0, "trained": 0, "dropped": {}, "failed": 0, "open": 0}


def test_a_run_that_failed_while_starting() -> None:
    end = RunFinished(outcome="failed", error="replica-1 is gone", exit_code=1)
    summary = fold_summary(records(*startup(), (20.0, "driver", end)))
    assert (summary["outcome"], summary["error"], summary["exit_code"]) == ("failed", "replica-1 is gone", 1)
    assert summary["startup_seconds"] is None
    assert summary["steps"] == 0


def test_a_sample_that_ended_twice_is_reported() -> None:
    twice = SampleDropped(ids=["s1a"], reason="stale")
    summary = fold_summary([*whole_run(), Record(whole_run()[-1].t, "message_queue", 8, twice)])
    assert summary["ledger_errors"] == ["sample s1a ended twice: trained (step 1), then dropped (stale)"]


def test_open_samples_are_an_error_only_of_a_completed_run() -> None:
    left = (20.0, "rollouter", SampleAdmitted(ids=["x"]))
    completed = fold_summary(records(*startup(), *training(), left, *finish(29.0)))
    assert completed["samples"]["open"] == 1
    assert completed["ledger_errors"] == ["1 samples are open although the run is completed"]
    unfinished = fold_summary(records(*startup(), *training(), left))
    assert unfinished["samples"]["open"] == 1
    assert unfinished["ledger_errors"] == []


def test_lag_counts_tokens_not_samples() -> None:
    trained = SampleTrained(ids=["a"], step=1, version=version(5), lags={0: 985, 2: 10, 5: 5})
    lag = fold_summary(records((1.0, "trainer", trained)))["version_lag"]
    assert lag == {"mean": pytest.approx(45 / 1000), "p99": 2, "max": 5, "predicted_mean": 0.0}


def test_time_held_up_by_a_sync_is_idle_time() -> None:
    timed = [
        (t, proc, msgspec.structs.replace(event, blocked_seconds=1.0) if isinstance(event, TrainStep) else event)
        for t, proc, event in [*step(10.0, 1, 0), *step(13.0, 2, 1)]
    ]
    # From 8.5 s to 13 s: half a second for samples, one second for the sync; what was before the first is start-up.
    assert fold_summary(records(*timed))["trainer_idle_ratio"] == pytest.approx(1.5 / 4.5)


def test_windows_outside_training_do_not_count_for_the_idle_ratio() -> None:
    timed = [window(5.0, "replica-0", 0, 0.0), *step(10.0, 1, 0), window(10.0, "replica-0", 0, 0.75)]
    timed.append(window(11.0, "replica-0", 0, 0.0))
    assert fold_summary(records(*timed))["rollouter_idle_ratio"] == pytest.approx(0.25)


def test_idle_ratios_stay_between_zero_and_one() -> None:
    too_busy = GenerationWindow(
        replica=REPLICAS[0],
        version=version(0),
        seconds=1.0,
        busy_seconds=1.2,
        steps=1,
        tokens=1,
        validation_tokens=0,
        running=1,
        waiting=0,
    )
    # The wait that the second update reports is longer than training has lasted.
    timed = [*step(10.0, 1, 0), (10.0, "replica-0", too_busy), *step(8.9, 2, 0)]
    summary = fold_summary(records(*timed))
    assert summary["rollouter_idle_ratio"] == 0.0
    assert 0.0 <= summary["trainer_idle_ratio"] <= 1.0


def test_a_validation_is_keyed_by_its_version_not_by_its_time() -> None:
    timed = [*validation(30.0, 2, 4, 0.7), *validation(31.0, 0, 0, 0.4), *validation(29.0, 1, 2, 0.9)]
    summary = fold_summary(records(*timed))
    assert (summary["val_accuracy_first"], summary["val_accuracy_last"]) == (0.4, 0.7)


def test_aborted_syncs_and_skipped_validations_are_apart() -> None:
    aborted = SyncAborted(version=version(3), phase="stage", error="e")
    skipped = ValidationSkipped(version=version(2), reason="pin limit")
    timed = [*sync(5.0, 0), (6.0, "synchronizer", aborted), (7.0, "rollouter", skipped)]
    summary = fold_summary(records(*timed))
    assert (summary["syncs"]["count"], summary["syncs"]["aborted_count"]) == (1, 1)
    assert summary["validations_skipped"] == 1
    assert summary["versions"] == 1


def test_responses_that_were_aborted_or_came_late_are_counted() -> None:
    made: list[tuple[float, str, AnyEvent]] = [
        (5.0, "replica-0", ResponsesAborted(replica="replica-0", requests=["1-1/0~0", "1-1/1~0"], reason="no time")),
        (6.0, "rollouter", ZombiesRefused(replica="replica-0", completions=3)),
        (7.0, "rollouter", ZombiesRefused(replica="replica-1", completions=1)),
        (8.0, "synchronizer", ZombiesRefused(replica="replica-1", completions=0, confirmations=1)),
    ]
    assert fold_summary(records(*made))["responses"] == {
        "aborted_count": 2,
        "zombies_count": 4,
        "zombie_confirmations_count": 1,
    }


def test_a_gap_in_the_sequence_of_a_process_is_a_lost_event() -> None:
    made = whole_run()
    trainer = [index for index, record in enumerate(made) if record.proc == "trainer"]
    kept = [record for index, record in enumerate(made) if index not in trainer[3:5]]
    assert fold_summary(kept)["lost_events"] == 2


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([float(value) for value in range(1, 101)], 0.99, 99.0),
        ([float(value) for value in range(1, 51)], 0.99, 50.0),
    ],
)
def test_quantiles(values: list[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == expected


def test_the_file_is_readable_json() -> None:
    summary = fold_summary(whole_run())
    text = encode_summary({**summary, "reward_last": math.nan}).decode()
    assert json.loads(text) == {**json.loads(encode_summary(summary)), "reward_last": None}
    assert text.count("\n") > 20
