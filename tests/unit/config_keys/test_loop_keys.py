"""Keys that change what the loops do, on whole runs of the marker model."""

from __future__ import annotations

from collections import Counter

from paceline.core.events import SampleDropped, SampleTrained, SyncConfirmed, TrainStep, ValidationFinished
from paceline.core.sample import Prompt
from tests.unit.config_keys.keys import shows
from tests.unit.config_keys.marker_run import MarkerRun, run_marked


def batch_sizes(run: MarkerRun) -> set[int]:
    return {len(event.ids) for event in run.events.of(SampleTrained)}


@shows("actor.ppo_mini_batch_size")
def test_an_update_takes_a_mini_batch_of_samples() -> None:
    assert batch_sizes(run_marked({"actor.ppo_mini_batch_size": 4})) == {4}
    assert batch_sizes(run_marked({"actor.ppo_mini_batch_size": 8})) == {8}


@shows("async_training.require_batches")
def test_an_update_takes_as_many_mini_batches_as_are_required() -> None:
    assert batch_sizes(run_marked({"async_training.require_batches": 1})) == {4}
    assert batch_sizes(run_marked({"async_training.require_batches": 2})) == {8}


@shows("rollout.total_rollout_steps")
def test_the_run_ends_after_its_samples() -> None:
    assert len(run_marked({"rollout.total_rollout_steps": 32}).events.of(TrainStep)) == 8
    assert len(run_marked({"rollout.total_rollout_steps": 16}).events.of(TrainStep)) == 4


@shows("async_training.trigger_parameter_sync_step")
def test_a_version_is_published_every_so_many_updates() -> None:
    assert len(run_marked({"async_training.trigger_parameter_sync_step": 1}).published) == 1 + 8
    assert len(run_marked({"async_training.trigger_parameter_sync_step": 4}).published) == 1 + 2


@shows("rollout.n")
def test_a_prompt_has_n_responses() -> None:
    assert {len(sample.responses) for sample, _, _ in run_marked({"rollout.n": 2}).log.records} == {2}
    assert {len(sample.responses) for sample, _, _ in run_marked({"rollout.n": 3}).log.records} == {3}


@shows("data.max_response_length")
def test_a_response_is_no_longer_than_it_may_be() -> None:
    def lengths(longest: int) -> set[int]:
        run = run_marked({"data.max_response_length": longest})
        return {len(response.token_ids) for sample, _, _ in run.log.records for response in sample.responses}

    assert (lengths(5), lengths(3)) == ({5}, {3})


@shows("rollout.num_replicas")
def test_every_replica_serves() -> None:
    def replicas(count: int) -> set[str]:
        return {e.replica for e in run_marked({"rollout.num_replicas": count}).events.of(SyncConfirmed)}

    assert replicas(1) == {"replica-0"}
    assert replicas(3) == {"replica-0", "replica-1", "replica-2"}


@shows("async_training.staleness_threshold")
def test_the_threshold_is_the_work_done_ahead() -> None:
    assert run_marked({"async_training.staleness_threshold": 0}).lags == {0}
    assert max(run_marked({"async_training.staleness_threshold": 2}).lags) > 0


AHEAD = {"async_training.staleness_threshold": 3}


@shows("async_training.max_version_lag")
def test_no_trained_token_is_staler_than_the_bound() -> None:
    assert max(run_marked(AHEAD).lags) > 1
    assert max(run_marked({**AHEAD, "async_training.max_version_lag": 1}).lags) == 1


@shows("async_training.max_version_lag_policy")
def test_the_policy_says_what_happens_to_what_is_too_stale() -> None:
    def run(policy: str) -> MarkerRun:
        bound = {"async_training.max_version_lag": 1, "async_training.max_version_lag_policy": policy}
        return run_marked({**AHEAD, **bound})

    def did(run: MarkerRun) -> tuple[bool, bool]:
        """Whether samples were dropped, and whether tokens were masked."""
        return bool(run.events.of(SampleDropped)), any(0 in sequence.loss_mask for sequence in run.sequences)

    assert did(run("wait")) == (False, False)
    assert did(run("drop")) == (True, False)
    assert did(run("mask")) == (False, True)


@shows("async_training.partial_rollout")
def test_a_sequence_goes_on_under_new_weights_or_keeps_its_version() -> None:
    def most_versions(partial: bool) -> int:
        run = run_marked({**AHEAD, "async_training.partial_rollout": partial, "data.max_response_length": 40})
        return max(len(set(response.versions)) for sample, _, _ in run.log.records for response in sample.responses)

    assert most_versions(True) > 1
    assert most_versions(False) == 1


@shows("async_training.use_trainer_do_validate")
def test_the_trainers_side_has_a_share_of_each_validation() -> None:
    def by_trainer(use: bool) -> set[int]:
        run = run_marked({"async_training.use_trainer_do_validate": use, "rollout.num_replicas": 1})
        records = run.events.of(ValidationFinished)
        assert len(records) == 5
        assert {(record.problems, record.trainer_error) for record in records} == {(4, "")}
        return {record.by_trainer for record in records}

    assert by_trainer(False) == {0}
    assert by_trainer(True) == {2}


@shows("algorithm.adv_estimator")
def test_estimators_make_different_advantages_of_the_same_rewards() -> None:
    found = {}
    for estimator in ("grpo", "dr_grpo", "rloo"):
        run = run_marked({"algorithm.adv_estimator": estimator, "rollout.n": 3})
        found[estimator] = {round(sequence.advantage, 3) for sequence in run.sequences}
    # Rewards of a group are 1, 0, 0 in some order: mean 1/3, the others' mean 0 or 1/2.
    assert found["dr_grpo"] == {0.667, -0.333}
    assert found["rloo"] == {1.0, -0.5}
    assert found["grpo"] == {1.155, -0.577}


@shows("algorithm.filter_groups.enable")
def test_groups_that_teach_nothing_are_dropped_when_filtered() -> None:
    class EvenPromptsAreEqual:
        def __init__(self) -> None:
            self._turn: Counter[str] = Counter()

        async def score(self, prompt: Prompt, response_text: str) -> float:
            self._turn[prompt.prompt_id] += 1
            return float(self._turn[prompt.prompt_id] % 2 and int(prompt.prompt_id[1:]) % 2)

    def dropped(enable: bool) -> int:
        run = run_marked({"algorithm.filter_groups.enable": enable}, reward=EvenPromptsAreEqual())
        assert sum(len(event.ids) for event in run.events.of(SampleTrained)) == 32
        return sum(len(event.ids) for event in run.events.of(SampleDropped))

    assert dropped(False) == 0
    assert dropped(True) > 8


@shows("trainer.test_freq", "trainer.val_before_train")
def test_validations_come_when_they_are_asked_for() -> None:
    assert run_marked({"trainer.test_freq": 2}).validated == [0, 2, 4, 6, 8]
    assert run_marked({"trainer.test_freq": 4}).validated == [0, 4, 8]
    assert run_marked({"trainer.test_freq": 0}).validated == [0, 8]
    assert run_marked({"trainer.test_freq": 4, "trainer.val_before_train": False}).validated == [4, 8]
