"""The fold behind the display, against values worked out by hand from the made run."""

from __future__ import annotations

import pytest

from paceline.core.events import (
    AnyEvent,
    RunFinished,
    SampleFailed,
    SyncAborted,
    SyncCaptured,
    SyncCompleted,
    SyncStaged,
    ValidationSkipped,
    ValidationStarted,
    WaitBegan,
    WaitEnded,
)
from paceline.observability.progress import Progress
from tests.unit.observability.made_run import (
    T0,
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


def progress_of(*timed: tuple[float, str, AnyEvent]) -> Progress:
    progress = Progress()
    progress.feed_all(records(*timed))
    return progress


def test_figures_of_a_run_in_the_middle() -> None:
    progress = progress_of(*startup(), *training(4))
    assert (progress.step, progress.total_steps) == (4, 8)
    assert progress.version == version(2)
    assert progress.reward == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert progress.response_length == 4.0
    assert (progress.lag_mean, progress.lag_max) == (0.25, 1)
    assert progress.trainer_idle_ratio == pytest.approx(0.25)
    assert progress.rollouter_idle_ratio == pytest.approx(0.2)
    assert progress.validation_curve == [(version(0), 0.41), (version(2), pytest.approx(0.61))]
    assert (progress.syncs, progress.syncs_verified) == (3, 3)
    assert progress.elapsed_seconds(T0 + 20) == 20.0
    # Four updates in 6 s between the first and the last of them: four more take 8 s.
    assert progress.remaining_seconds() == pytest.approx(8.0)


def test_tokens_per_second_are_of_all_replicas_and_fade() -> None:
    progress = progress_of(window(10.0, "replica-0", 0, 1.0), window(10.2, "replica-1", 0, 1.0))
    assert progress.tokens_per_second(T0 + 10.2) == pytest.approx(2 * 4500)
    assert progress.tokens_per_second(T0 + 15.1) == pytest.approx(4500)
    assert progress.tokens_per_second(T0 + 60) == 0


def test_a_replica_goes_from_starting_to_ready_to_fenced() -> None:
    timed = list(startup())
    assert progress_of(timed[0]).replicas["replica-0"].state == "starting"
    assert progress_of(*timed).replicas["replica-0"].state == "joining"
    timed += sync(12.0, 0)
    progress = progress_of(*timed)
    assert (progress.replicas["replica-0"].state, progress.replicas["replica-0"].version) == ("ready", version(0))
    staged = SyncStaged(replica="replica-0", version=version(1), seconds=0.1, verified=True)
    progress.feed_all(records((13.0, "synchronizer", staged)))
    assert (progress.replicas["replica-0"].state, progress.replicas["replica-0"].version) == ("staged", version(0))
    fenced = SyncCompleted(
        version=version(1), mode="full", bytes=1, seconds=1.0, phases={}, pauses={}, fenced=["replica-0"], verified=True
    )
    progress.feed_all(records((14.0, "synchronizer", fenced)))
    assert progress.replicas["replica-0"].state == "fenced"
    assert "replica-0" in progress.trouble


def test_waits_are_shown_from_their_begin_to_their_end() -> None:
    began = WaitBegan(who="trainer", what="samples", since_wall=T0 + 3)
    other = WaitBegan(who="rollouter", what="room in the queue", since_wall=T0 + 4)
    ended = WaitEnded(who="trainer", what="samples", seconds=5.0)
    progress = progress_of((5.0, "trainer", began), (5.0, "rollouter", other))
    assert progress.waits == {("trainer", "samples"): T0 + 3, ("rollouter", "room in the queue"): T0 + 4}
    progress.feed_all(records((8.0, "trainer", ended)))
    assert list(progress.waits) == [("rollouter", "room in the queue")]
    progress.feed_all(records((9.0, "driver", RunFinished(outcome="failed", error="e", exit_code=1))))
    assert progress.waits == {}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (SyncAborted(version=version(3), phase="stage", error="no answer"), "sync of 1.3 ended in stage: no answer"),
        (SampleFailed(ids=["a"], error="no reward"), "a sample failed: no reward"),
        (ValidationSkipped(version=version(2), reason="pin limit"), "no validation of 1.2: pin limit"),
    ],
)
def test_trouble_is_told(event: AnyEvent, words: str) -> None:
    assert progress_of((1.0, "synchronizer", event)).trouble == words


def test_a_validation_runs_until_its_result_or_its_refusal() -> None:
    started = (1.0, "rollouter", ValidationStarted(version=version(1), problems=9))
    assert progress_of(started).validating is not None
    skipped = (2.0, "rollouter", ValidationSkipped(version=version(1), reason="failed"))
    assert progress_of(started, skipped).validating is None
    assert progress_of(*validation(5.0, 1, 2, 0.5)).validating is None


def test_captured_runs_ahead_of_published() -> None:
    captured = SyncCaptured(version=version(1), bytes=1, digest="d", seconds=0.1, wait_seconds=0.0)
    progress = progress_of(*sync(1.0, 0), (2.0, "synchronizer", captured))
    assert (progress.version, progress.captured) == (version(0), version(1))


def test_missing_processes_are_the_planned_ones_that_are_not_ready() -> None:
    assert progress_of(*list(startup())[:3]).missing_processes() == [
        "replica-1",
        "rollouter",
        "message_queue",
        "synchronizer",
    ]
    assert progress_of(*startup()).missing_processes() == []


def test_an_end_has_no_remaining_time() -> None:
    progress = Progress()
    progress.feed_all(whole_run())
    assert progress.remaining_seconds() is None
    assert progress_of(*startup(), *step(12.0, 1, 0)).remaining_seconds() is None
    assert progress_of(*startup(), *training(4), *finish(30.0)).remaining_seconds() is None
