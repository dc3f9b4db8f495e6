"""C20: resume with samples in flight, and with the right weights; and its relatives."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from paceline.core.events import (
    CheckpointSaved,
    RunResumed,
    SampleDropped,
    SampleTrained,
    SyncCompleted,
    TrainStep,
    ValidationFinished,
)
from paceline.core.version import Version
from paceline.runtime.resume import load_meta
from paceline.store.checkpoint_directory import newest_checkpoint
from paceline.testing.marker_model import marker_logprob, marker_of, marker_token
from tests.simulation.lives import Run
from tests.simulation.sample_world import SampleWorld


def settings(steps: int, **trainer: object) -> dict[str, object]:
    return {
        "actor": {"ppo_mini_batch_size": 2},
        "async_training": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 1},
        "rollout": {"n": 2, "num_replicas": 1, "total_rollout_steps": 2 * steps, "max_num_seqs": 4},
        "trainer": {"test_freq": 0, "val_before_train": False, "save_freq": 1, **trainer},
        "data": {"max_response_length": 8, "val_size": 2},
    }


def surviving_prompts(run: Run) -> Counter[str]:
    """Prompt ids trained in the surviving lineage, worked out from the events alone."""
    lost_after: dict[int, int] = {}
    life = 0
    for event in run.events:
        if isinstance(event, RunResumed):
            for older in range(event.from_life + 1, life):
                lost_after[older] = 0
            lost_after[event.from_life] = event.step
        if type(event).__name__ == "RunStarted":
            life += 1
    counted: Counter[str] = Counter()
    prompt_of = {(sample.sample_id, life): sample.prompt.prompt_id for sample, _, life in run.trained}
    life = 0
    for event in run.events:
        if type(event).__name__ == "RunStarted":
            life += 1
        if isinstance(event, SampleTrained) and event.step <= lost_after.get(life, 1 << 30):
            counted.update(prompt_of[one, life] for one in event.ids)
    return counted


def check(run: Run, steps: int) -> None:
    """Everything that has to hold of a finished run, however often it was killed."""
    counted = surviving_prompts(run)
    assert set(counted.values()) == {1}
    assert len(counted) == 2 * steps
    ledger = run.ledger
    assert ledger.errors() == []
    assert (ledger.trained, ledger.open, ledger.failed) == (2 * steps, 0, 0)
    assert ledger.admitted == 2 * steps + len(ledger.lost)
    for sample, captured, _ in run.trained:
        for response in sample.responses:
            made = zip(response.token_ids, response.logprobs, response.versions, strict=True)
            assert len(response.token_ids) == 8
            for position, (token, logprob, version) in enumerate(made):
                marker = Version.unpack(version).n  # one update per version: they rise together
                assert (token, logprob) == (marker_token(marker, position), marker_logprob(marker, position))
                assert version <= captured


def test_the_case_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(6))
    # Killed right after the checkpoint of version 1, with {0, 1} trained and others queued and in flight.
    run.live(kill_at=killed_after_checkpoint(tmp_path / "probe", 1))
    assert max(event.step for event in run.events if isinstance(event, TrainStep)) == 1
    before = len(run.trained)
    run.live()
    check(run, 6)
    resumed = next(event for event in run.events if isinstance(event, RunResumed))
    assert (resumed.step, resumed.version) == (1, Version(1, 1).packed)
    assert len(resumed.restored) > 0
    again = [one for event in run.events if isinstance(event, SampleTrained) for one in event.ids]
    assert len(set(again)) == len(again) == 12, "the first two were trained again"
    published = [Version.unpack(e.version) for e in run.events if isinstance(e, SyncCompleted) and e.version >> 40 == 2]
    assert published[:2] == [Version(2, 1), Version(2, 2)]
    made = [
        (marker_of(token), Version.unpack(version))
        for sample, _, _ in run.trained[before:]
        for response in sample.responses
        for token, version in zip(response.token_ids, response.versions, strict=True)
    ]
    assert {marker for marker, version in made if version == Version(2, 1)} == {1}


def killed_after_checkpoint(directory: Path, step: int) -> float:
    """When the checkpoint of this update is whole, in virtual seconds: found by a run of its own."""
    for tick in itertools.count(1):
        run = Run(directory / str(tick), settings(6))
        run.live(kill_at=0.02 * tick)
        if any(isinstance(event, CheckpointSaved) and event.step == step for event in run.events):
            return 0.02 * tick
    raise AssertionError


def test_partial_responses_go_on_with_their_version_list(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(6))
    run.live(kill_at=killed_after_checkpoint(tmp_path / "probe", 1))
    first_life = run.life
    run.live()
    mixed = [
        response.versions
        for sample, _, life in run.trained
        if life > first_life
        for response in sample.responses
        if {version >> 40 for version in response.versions} == {1, 2}
    ]
    assert mixed, "no response goes on over the two lives"
    assert all(versions == sorted(versions) for versions in mixed)


@pytest.mark.parametrize("kill_at", [0.1 + 0.037 * k for k in range(20)])
def test_a_kill_at_any_moment(tmp_path: Path, kill_at: float) -> None:
    run = Run(tmp_path, settings(6))
    run.live(kill_at=kill_at)
    run.live()
    check(run, 6)


@pytest.mark.parametrize("seed", range(8))
def test_three_kills_and_several_epochs(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, settings(12, max_ckpt_to_keep=1), prompts=5)
    for kill_at in (0.3 + 0.05 * seed, 0.21 + 0.03 * seed, 0.33 + 0.01 * seed):
        run.live(kill_at=kill_at)
    run.live()
    check(run, 12)


@pytest.mark.parametrize("policy", ["wait", "mask", "drop"])
def test_a_bound_on_the_lag_holds_over_lives(tmp_path: Path, policy: str) -> None:
    chosen = settings(8)
    chosen["async_training"] = {
        "staleness_threshold": 3.0,
        "trigger_parameter_sync_step": 1,
        "max_version_lag": 1,
        "max_version_lag_policy": policy,
    }
    run = Run(tmp_path, chosen, prompts=100)
    run.live(kill_at=0.5)
    run.live()
    assert run.ledger.errors() == []
    assert run.ledger.trained == 16
    if policy != "mask":
        assert max(lag for e in run.events if isinstance(e, SampleTrained) for lag in e.lags) <= 1
    if policy != "drop":
        assert not [e for e in run.events if isinstance(e, SampleDropped)]


@pytest.mark.parametrize("kill_at", [0.4, 0.5, 0.6])
def test_with_partial_rollout_off_every_response_is_of_one_version(tmp_path: Path, kill_at: float) -> None:
    chosen = settings(8)
    chosen["async_training"] = {
        "staleness_threshold": 1.0,
        "trigger_parameter_sync_step": 1,
        "partial_rollout": False,
    }
    run = Run(tmp_path, chosen)
    run.live(kill_at=kill_at)
    run.live()
    check(run, 8)
    assert {len(set(response.versions)) for sample, _, _ in run.trained for response in sample.responses} == {1}


def test_threshold_zero_stays_on_policy_over_lives(tmp_path: Path) -> None:
    chosen = settings(8)
    chosen["async_training"] = {"staleness_threshold": 0.0, "trigger_parameter_sync_step": 2}
    run = Run(tmp_path, chosen)
    run.live(kill_at=0.5)
    run.live(preempt_at=0.3)
    run.live()
    step_of = {(e_id, life): step for e_id, life, step in trained_steps(run)}
    for sample, _, life in run.trained:
        n = (step_of[sample.sample_id, life] - 1) // 2
        assert {Version.unpack(v).n for response in sample.responses for v in response.versions} == {n}
    assert run.ledger.trained == 16


def trained_steps(run: Run) -> list[tuple[str, int, int]]:
    life = 0
    found: list[tuple[str, int, int]] = []
    for event in run.events:
        life += type(event).__name__ == "RunStarted"
        if isinstance(event, SampleTrained):
            found.extend((one, life, event.step) for one in event.ids)
    return found


def test_a_preempted_run_saves_between_two_syncs_and_goes_on(tmp_path: Path) -> None:
    saved_at: list[int] = []
    for preempt_at in (0.3, 0.35, 0.4, 0.45):
        chosen = settings(8, save_freq=0)
        chosen["async_training"] = {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 4}
        run = Run(tmp_path / str(preempt_at), chosen)
        run.live(preempt_at=preempt_at)
        saved_at += [event.step for event in run.events if isinstance(event, CheckpointSaved)]
        run.live()
        counted = surviving_prompts(run)
        assert (len(counted), set(counted.values())) == (16, {1})
        steps = [event.step for event in run.events if isinstance(event, TrainStep)]
        assert steps == list(range(1, 9))
    assert any(step % 4 for step in saved_at), "none was saved between two syncs"


def test_saving_stops_no_generation(tmp_path: Path) -> None:
    chosen = settings(6, save_freq=2)
    chosen["async_training"] = {"staleness_threshold": 3.0, "trigger_parameter_sync_step": 2}
    run = Run(tmp_path, chosen, save_seconds=0.1)
    run.live()
    assert [event.pause_seconds for event in run.events if isinstance(event, CheckpointSaved)] == [0.0, 0.0, 0.0]
    # The first save comes while there is much to do: 10 steps of 4 sequences at the most.
    assert max(run.during_saves) >= 20


def test_a_checkpoint_has_the_newest_validation_of_its_run(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(6, test_freq=1, val_before_train=True))
    run.live()
    checkpoint, _ = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    found = load_meta(checkpoint).validation
    finished = {event.version: event for event in run.events if isinstance(event, ValidationFinished)}
    assert found is not None
    event = finished[found.version]
    assert (found.step, found.accuracy, found.problems) == (event.step, event.accuracy, event.problems)
    assert Version.unpack(found.version).n >= 1


def test_a_put_that_waits_for_room_leaves_no_trained_sample_in_a_checkpoint() -> None:
    """The queue has taken a part of what the rollouter puts, and the trainer a part of that."""
    world = SampleWorld(settings(6), queue_capacity=1)
    world.capture()
    world.publish()
    for replica, request_id in world.held():
        replica.finish(request_id)
    world.settle()
    world.train()
    assert world.step == 1
    world.save()
    assert world.cut is not None
    trained = {one.sample.sample_id for one in world.trained}
    assert trained.isdisjoint(world.cut.snapshot.open_ids)
    world.close()
