"""C16 to C19 on whole runs, and what the lag of a run has to be."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lineage_check import kolmogorov_smirnov
from paceline.core.config import build_config
from paceline.core.errors import ConfigError, ProducerFailed
from paceline.core.events import GroupReduced, SampleDropped, SampleFailed, SampleTrained
from paceline.core.sample import Prompt
from paceline.observability.summary import fold_summary
from paceline.testing.marker_model import MarkerEngine, marker_of
from tests.simulation.hand_replica import HandReplica
from tests.simulation.sample_world import SampleWorld
from tests.simulation.timed_run import RaggedEngine, Seconds, TimedRun, run_timed, versions_of
from tests.unit.config_keys.marker_run import run_marked


def plain_engine(places: int) -> MarkerEngine:
    return MarkerEngine(places=places)


def ragged_engine(places: int) -> MarkerEngine:
    return RaggedEngine(places=places)


# ---- C17: the window, strictly on-policy ------------------------------


def test_c17_run_a_a_slow_push_at_threshold_zero_stalls_nothing_and_stays_on_policy() -> None:
    settings = {
        "actor.ppo_mini_batch_size": 8,
        "async_training.staleness_threshold": 0,
        "async_training.trigger_parameter_sync_step": 1,
        "rollout.total_rollout_steps": 8 * 20,
    }
    run = run_timed(settings, Seconds(update=0.1, decode=0.005, push=0.5), plain_engine)
    assert run.seconds < 30
    assert sorted({step for step, _ in run.samples()}) == list(range(1, 21))
    for step, sample in run.samples():
        assert {marker_of(token) for response in sample.responses for token in response.token_ids} == {step - 1}


@pytest.mark.parametrize("trigger", [1, 2, 3])
@pytest.mark.parametrize("push", [0.0, 0.5])
def test_threshold_zero_is_on_policy_for_every_trigger(trigger: int, push: float) -> None:
    settings = {
        "actor.ppo_mini_batch_size": 3,
        "async_training.staleness_threshold": 0,
        "async_training.trigger_parameter_sync_step": trigger,
        "rollout.total_rollout_steps": 3 * 9,
    }
    run = run_timed(settings, Seconds(update=0.1, decode=0.005, push=push), ragged_engine)
    assert len(run.samples()) == 27
    for step, sample in run.samples():
        published = (step - 1) // trigger
        assert versions_of(sample) == {published}
        made_by = {marker_of(token) for response in sample.responses for token in response.token_ids}
        assert made_by == {published * trigger}  # one update raises the marker by one


def world(**settings: Any) -> SampleWorld:
    tree: dict[str, Any] = {
        "actor": {"ppo_mini_batch_size": 4},
        "async_training": {"staleness_threshold": 0.25, "trigger_parameter_sync_step": 2},
        "rollout": {"n": 2, "total_rollout_steps": 40, "max_num_seqs": 64},
        "trainer": {"stall_timeout_seconds": 1e9},
    }
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    return SampleWorld(tree)


def begun(**settings: Any) -> SampleWorld:
    made = world(**settings)
    made.capture()
    made.publish()
    return made


def test_c17_run_b_a_new_window_counts_what_is_active_waits_and_is_queued() -> None:
    run = begun()
    rollout, _ = run.statistics()
    assert (rollout.allowed, rollout.used, rollout.in_flight) == (10, 10, 10)  # floor(4 * 1.25 * 2)
    for replica, request_id in run.held():
        if request_id.startswith(("1-1/", "1-2/", "1-3/", "1-4/", "1-5/", "1-6/", "1-7/", "1-8/", "1-9/")):
            replica.finish(request_id)
    run.settle()
    run.train()
    run.train()  # 8 of the 10 are trained: one is queued, one is active
    run.capture()
    run.publish()
    rollout, queue = run.statistics()
    assert (queue.size, rollout.taken, rollout.outstanding) == (1, 8, 10)
    assert (rollout.used, rollout.in_flight) == (10, 9)  # 2 were left over, and 8 admitted
    run.close()


# ---- C16: ends ------------------------------


def test_c16_a_producer_that_fails_is_no_end_of_data() -> None:
    run = begun()
    for replica, request_id in run.held()[:10]:
        replica.finish(request_id)
    run.settle()

    async def fail() -> None:
        await run.queue.fail("rollouter", "RuntimeError: decode")

    run.do(fail())
    run.train()  # what was made before is trained all the same
    assert run.step == 1
    with pytest.raises(ProducerFailed, match="rollouter: RuntimeError: decode"):
        run.train()
    run.close()


# ---- C18: a full queue ------------------------------


def test_c18_behind_a_full_queue_pause_statistics_and_checkpoints_go_on() -> None:
    run = SampleWorld(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 1},
            "rollout": {"n": 2, "total_rollout_steps": 40, "max_num_seqs": 64},
        },
        queue_capacity=1,
    )
    run.capture()
    run.publish()
    for replica, request_id in run.held():
        replica.finish(request_id)
    run.settle()
    rollout, queue = run.statistics()
    assert (rollout.outstanding, rollout.in_flight, queue.size, queue.put) == (8, 0, 1, 1)  # seven wait for room
    run.do(run.rollouter.pause())
    run.do(run.rollouter.resume())
    run.save()
    assert run.cut is not None
    assert len(run.cut.snapshot.open_ids) == len(set(run.cut.snapshot.open_ids)) == 8
    run.crash()  # all eight are there again, and each is trained once
    run.capture()
    run.publish()
    run.train()
    run.capture()
    run.publish()
    run.train()
    assert sorted(run.prompts_trained().values()) == [1] * 8
    run.close()


# ---- C19: groups that teach nothing ------------------------------


class Equal:
    async def score(self, prompt: Prompt, response_text: str) -> float:
        return 0.1


def test_c19_a_run_in_which_all_groups_are_equal_has_advantages_of_exactly_zero() -> None:
    run = run_marked({"rollout.n": 3}, reward=Equal())
    assert {sequence.advantage for sequence in run.sequences} == {0.0}


def test_c19_a_run_of_single_responses_has_advantages_of_exactly_zero() -> None:
    run = run_marked({"rollout.n": 1, "algorithm.adv_estimator": "dr_grpo"})
    assert {sequence.advantage for sequence in run.sequences} == {0.0}


# ---- the bound on lag ------------------------------

BUSY = {
    "actor.ppo_mini_batch_size": 8,
    "async_training.staleness_threshold": 2,
    "async_training.trigger_parameter_sync_step": 1,
    "rollout.total_rollout_steps": 8 * 60,
    "rollout.max_num_seqs": 8,
    "data.max_response_length": 64,
}
TRAINER_BOUND = Seconds(update=0.1, decode=0.01, push=0.02)


def middle_lengths(run: TimedRun) -> list[float]:
    """Response lengths trained neither at the start nor at the end of the run, where short ones come first anyway."""
    samples = [sample for step, sample in run.samples() if 10 < step <= 50]
    return [float(len(response.token_ids)) for sample in samples for response in sample.responses]


def bounded(policy: str) -> dict[str, object]:
    return {**BUSY, "async_training.max_version_lag": 1, "async_training.max_version_lag_policy": policy}


def longest_lag(run: TimedRun) -> int:
    trained = [record.event for record in run.records if isinstance(record.event, SampleTrained)]
    return max(lag for event in trained for lag in event.lags)


def test_under_wait_the_trained_lengths_are_distributed_as_without_a_bound() -> None:
    free, waiting = (
        run_timed(BUSY, TRAINER_BOUND, ragged_engine),
        run_timed(bounded("wait"), TRAINER_BOUND, ragged_engine),
    )
    assert longest_lag(free) > 1 >= longest_lag(waiting)
    _, p_value = kolmogorov_smirnov(middle_lengths(free), middle_lengths(waiting))
    assert p_value > 0.1


def test_under_drop_long_responses_are_lost_and_the_report_says_so() -> None:
    free, dropping = (
        run_timed(BUSY, TRAINER_BOUND, ragged_engine),
        run_timed(bounded("drop"), TRAINER_BOUND, ragged_engine),
    )
    assert longest_lag(dropping) <= 1
    _, p_value = kolmogorov_smirnov(middle_lengths(free), middle_lengths(dropping))
    assert p_value < 0.001
    dropped = fold_summary(dropping.records)["dropped_response_lengths"]["max_version_lag"]
    mean_dropped = sum(length * count for length, count in dropped.items()) / sum(dropped.values())
    trained = middle_lengths(dropping)
    assert mean_dropped > 1.2 * sum(trained) / len(trained)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_wait_holds_the_bound_while_a_push_takes_longer_than_an_update(bound: int) -> None:
    """Samples that are admitted between the trainer's question and the publication must not cross the next capture."""
    settings = {**bounded("wait"), "async_training.max_version_lag": bound, "async_training.staleness_threshold": 1.3}
    run = run_timed(settings, Seconds(update=0.05, decode=0.01, push=0.4), ragged_engine)
    assert longest_lag(run) <= bound
    assert len(run.samples()) == 8 * 60


# ---- the lag that was predicted ------------------------------


@pytest.mark.parametrize(("threshold", "trigger"), [(0.0, 1), (0.5, 1), (0.5, 2), (1.0, 2), (2.0, 1), (1.5, 3)])
def test_the_measured_mean_lag_is_the_predicted_one_and_the_threshold_where_the_trainer_is_slower(
    threshold: float, trigger: int
) -> None:
    settings = {
        "actor.ppo_mini_batch_size": 8,
        "async_training.staleness_threshold": threshold,
        "async_training.trigger_parameter_sync_step": trigger,
        "rollout.total_rollout_steps": 8 * trigger * 40,
        "rollout.max_num_seqs": 64,
        "data.max_response_length": 8,
    }
    run = run_timed(settings, Seconds(update=0.2, decode=0.001, push=0.002), ragged_engine)
    lag = fold_summary(run.records)["version_lag"]
    assert lag["mean"] == pytest.approx(lag["predicted_mean"], abs=0.05)
    assert lag["predicted_mean"] == pytest.approx(threshold, abs=0.1 * threshold)


def test_where_replicas_are_slower_the_prediction_follows_what_is_outstanding() -> None:
    run = run_timed(BUSY, Seconds(update=0.01, decode=0.05, push=0.01), ragged_engine)
    lag = fold_summary(run.records)["version_lag"]
    assert lag["predicted_mean"] <= 2.0
    assert 0.5 * lag["predicted_mean"] <= lag["mean"] <= lag["predicted_mean"] + 0.05


# ---- responses that cannot be made ------------------------------


def finish_all(run: SampleWorld, but: str = "none") -> None:
    for replica, request_id in run.held():
        if not request_id.startswith(but):
            replica.finish(request_id)
    run.settle()


def test_a_sample_that_is_in_flight_too_long_is_aborted_counted_and_made_up_for() -> None:
    run = begun(rollout={"n": 3, "sample_timeout_seconds": 60.0})
    finish_all(run, but="1-2/2")  # one response of one sample hangs
    before, _ = run.statistics()
    assert (before.in_flight, before.failed) == (1, 0)
    run.settle(61.0)
    after, _ = run.statistics()
    (holder,) = [replica for replica in run.replicas if replica.aborted]
    assert holder.aborted == ["1-2/2~0"]
    assert (after.failed, after.admitted - before.admitted, after.outstanding) == (1, 1, before.outstanding)
    (dropped,) = [event for event in run.sink.events if isinstance(event, SampleDropped)]
    assert (dropped.ids, dropped.reason, dropped.lengths) == (["1-2"], "sample_timeout", {1: 2})
    assert run.ledger.dropped == {"sample_timeout": 1}
    run.close()


def test_survivors_of_a_sample_that_is_in_flight_too_long_are_trained() -> None:
    run = begun(rollout={"n": 3, "sample_timeout_seconds": 60.0, "group_policy": "survivors"})
    finish_all(run, but="1-2/2")
    run.settle(61.0)
    assert [(e.sample_id, e.lacking, e.reason) for e in run.sink.events if isinstance(e, GroupReduced)] == [
        ("1-2", 1, "sample_timeout")
    ]
    run.train()
    run.train()
    run.capture()
    run.publish()
    finish_all(run)
    run.train()
    sizes = {one.sample.sample_id: len(one.sample.responses) for one in run.trained}
    assert sizes["1-2"] == 2
    assert set(sizes.values()) == {2, 3}
    assert run.ledger.errors() == []
    run.close()


def test_a_prompt_that_kills_its_replica_is_set_aside_alone() -> None:
    run = begun(rollout={"n": 2, "max_sample_losses": 3})

    def victims() -> list[int]:
        return [i for i, replica in enumerate(run.replicas) if any(one.startswith("1-3/") for one in replica.held)]

    for _ in range(20):
        if victims():
            run.lose(victims()[0])
        else:
            finish_all(run, but="1-3/")
    failed = [event for event in run.sink.events if isinstance(event, SampleFailed)]
    assert [(event.ids, event.error) for event in failed] == [(["1-3"], "its replica was lost 3 times")]
    finish_all(run)
    run.train()
    assert run.ledger.errors() == []
    run.close()


def test_a_replica_that_is_moved_by_hand_takes_nothing_twice() -> None:
    """The fakes of this file refuse a request that comes twice."""
    run = begun()
    run.lose(0)
    assert isinstance(run.replicas[0], HandReplica)
    finish_all(run)
    finish_all(run)
    assert run.statistics()[0].in_flight == 0
    run.close()


def test_a_deadline_of_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="sample_timeout_seconds"):
        build_config({"rollout": {"sample_timeout_seconds": 0}})
