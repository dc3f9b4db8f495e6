"""Keys of the rollouter: replicas that hang or die, slow rewards, validations that overlap; on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.errors import DeadlineExceeded, ProducerFailed
from paceline.core.events import ReplicaChanged, SampleFailed, ValidationStarted
from paceline.core.sample import Prompt
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.config_keys.marker_run import run_marked
from tests.unit.rollout.test_rollouter import EchoReplica, Rig, with_rig

SMALL: dict[str, object] = {
    "actor.ppo_mini_batch_size": 8,
    "async_training.trigger_parameter_sync_step": 1,
    "rollout.n": 2,
    "rollout.total_rollout_steps": 40,
}


class FairReward:
    async def score(self, prompt: Prompt, response_text: str) -> float:
        return 1.0


class SlowReward:
    """Takes 5 s, and counts how many are scored at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(5)
        self._now -= 1
        return 1.0


class HangingReplica(EchoReplica):
    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await asyncio.Event().wait()
        raise AssertionError


@shows("rollout.exchange_timeout_seconds")
def test_a_replica_that_does_not_answer_is_lost_after_the_timeout() -> None:
    def lost_after_30_seconds(timeout: float) -> list[str]:
        lost: list[str] = []

        async def scenario(rig: Rig) -> None:
            rig.replicas.append(HangingReplica(rig.clock, "replica-2"))
            await rig.rollouter.add_replica(rig.replicas[-1])
            await rig.publish(0)
            await rig.clock.sleep(30)
            lost.extend(e.replica for e in rig.events.of(ReplicaChanged) if e.state == "lost")

        with_rig(scenario, config_with({**SMALL, "rollout.exchange_timeout_seconds": timeout}), FairReward())
        return lost

    assert lost_after_30_seconds(10) == ["replica-2"]
    assert lost_after_30_seconds(60) == []


@shows("rollout.replica_return_seconds")
def test_a_run_without_replicas_fails_after_it_has_waited() -> None:
    def failed_after(seconds: float) -> float:
        times: list[float] = []

        async def scenario(rig: Rig) -> None:
            for replica in rig.replicas:
                replica.dead = True
            await rig.publish(0)
            with pytest.raises(ProducerFailed, match="no replica is left"):
                await rig.queue.get_samples(8, 1000.0)
            times.append(rig.clock.now())

        with_rig(scenario, config_with({**SMALL, "rollout.replica_return_seconds": seconds}), FairReward())
        return times[0]

    assert failed_after(5) == pytest.approx(5, abs=1)
    assert failed_after(50) == pytest.approx(50, abs=1)


@shows("rollout.max_sample_losses")
def test_a_sample_is_set_aside_after_so_many_losses() -> None:
    def failed_after_one_round(most: int) -> int:
        failed: list[str] = []

        async def scenario(rig: Rig) -> None:
            for replica in rig.replicas:
                replica.dead = True
            await rig.publish(0)
            await rig.clock.sleep(5)
            failed.extend(i for event in rig.events.of(SampleFailed) for i in event.ids)

        with_rig(scenario, config_with({**SMALL, "rollout.max_sample_losses": most}), FairReward())
        return len(failed)

    assert failed_after_one_round(1) > 0
    assert failed_after_one_round(4) == 0


@shows("rollout.max_pinned_versions")
def test_as_many_validations_overlap_as_versions_may_be_pinned() -> None:
    def started(pins: int) -> list[int]:
        versions: list[int] = []

        async def scenario(rig: Rig) -> None:
            rig.replicas[0].hold_validation.clear()
            for version in range(2):
                await rig.publish(version, validate=True)
                await rig.clock.sleep(1)
            rig.replicas[0].hold_validation.set()
            await rig.rollouter.wait_validations()
            versions.extend(event.version for event in rig.events.of(ValidationStarted))

        with_rig(scenario, config_with({**SMALL, "rollout.max_pinned_versions": pins}), FairReward())
        return versions

    assert started(1) == [0]
    assert started(2) == [0, 1]
    assert config_with({"rollout.max_pinned_versions": 2}).arenas > config_with({}).arenas


@shows("reward.timeout_seconds")
def test_a_slow_reward_fails_its_sample() -> None:
    def failed(timeout: float) -> int:
        events: list[SampleFailed] = []

        async def scenario(rig: Rig) -> None:
            await rig.publish(0)
            await rig.clock.sleep(20)
            events.extend(rig.events.of(SampleFailed))

        with_rig(scenario, config_with({**SMALL, "reward.timeout_seconds": timeout}), SlowReward())
        return len(events)

    assert failed(1) > 0
    assert failed(30) == 0


@shows("reward.num_workers")
def test_so_many_samples_are_scored_at_once() -> None:
    def most_at_once(workers: int) -> int:
        reward = SlowReward()

        async def scenario(rig: Rig) -> None:
            await rig.publish(0)
            await rig.clock.sleep(20)

        with_rig(scenario, config_with({**SMALL, "reward.num_workers": workers}), reward)
        return reward.most

    assert (most_at_once(1), most_at_once(3)) == (1, 3)


@shows("trainer.stall_timeout_seconds")
def test_a_stalled_run_fails_after_the_timeout_and_names_who_waited() -> None:
    class NoReward:
        async def score(self, prompt: Prompt, response_text: str) -> float:
            await asyncio.Event().wait()
            raise AssertionError

    def stalled(seconds: float) -> DeadlineExceeded:
        settings = {"trainer.stall_timeout_seconds": seconds, "reward.timeout_seconds": 1e6, "trainer.test_freq": 0}
        with pytest.raises(DeadlineExceeded) as caught:
            run_marked({**settings, "trainer.val_before_train": False}, reward=NoReward())
        return caught.value

    for seconds in (20.0, 300.0):
        error = stalled(seconds)
        assert error.args[2] == seconds
        assert error.culprit in ("rollouter", "trainer")
