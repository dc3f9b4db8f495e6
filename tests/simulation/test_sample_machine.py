"""Samples in any order of events: production rollouter, queue, batcher and lag gate, driven by a state machine with
deaths, crashes, resumes, versions, drops, refusals, deadlines and other capacities. In every state the ledger adds up
and all bounds hold; and whatever has happened, the run can be brought to its end.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulation.sample_world import SampleWorld

STEPS = 9
LENGTH = 5
THRESHOLDS = (0.0, 0.25, 0.36, 0.5, 1.0, 1.5)
TIMEOUT_SECONDS = 60.0


class Samples(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        required=st.integers(2, 4),
        threshold=st.sampled_from(THRESHOLDS),
        trigger=st.integers(1, 3),
        policy=st.sampled_from((None, "wait", "wait", "wait", "mask", "drop")),
        bound=st.integers(0, 2),
        n=st.integers(2, 3),
        group_policy=st.sampled_from(("retry", "survivors")),
        filters=st.booleans(),
        timeout=st.sampled_from((None, TIMEOUT_SECONDS)),
        capacity=st.sampled_from((None, 1, 3)),
    )
    def begin(
        self,
        *,
        required: int,
        threshold: float,
        trigger: int,
        policy: str | None,
        bound: int,
        n: int,
        group_policy: str,
        filters: bool,
        timeout: float | None,
        capacity: int | None,
    ) -> None:
        self.bound = bound
        self.policy = policy
        settings_of_run: dict[str, Any] = {
            "actor": {"ppo_mini_batch_size": required},
            "algorithm": {"filter_groups": {"enable": filters}},
            "async_training": {
                "staleness_threshold": threshold,
                "trigger_parameter_sync_step": trigger,
                "max_version_lag": None if policy is None else bound,
                "max_version_lag_policy": policy or "wait",
            },
            "rollout": {
                "n": n,
                "num_replicas": 2,
                "total_rollout_steps": STEPS * required,
                "max_num_seqs": 4,
                "max_sample_losses": 2,
                "group_policy": group_policy,
                "sample_timeout_seconds": timeout,
            },
            "trainer": {"stall_timeout_seconds": 1e9},
            "data": {"max_response_length": LENGTH},
        }
        self.world = SampleWorld(settings_of_run, queue_capacity=capacity)

    # -- replicas ----------------------------------------

    @precondition(lambda self: self.world.held())
    @rule(data=st.data(), count=st.integers(1, 6))
    def decode(self, data: st.DataObject, count: int) -> None:
        """Some of the requests in flight get a token."""
        for _ in range(count):
            replica, request_id = data.draw(st.sampled_from(self.world.held()))
            replica.decode([request_id])

    @precondition(lambda self: self.world.held())
    @rule(data=st.data(), count=st.integers(1, 24))
    def finish(self, data: st.DataObject, count: int) -> None:
        """Some of them end, in any order."""
        for _ in range(count):
            held = self.world.held()
            if held:
                replica, request_id = data.draw(st.sampled_from(held))
                replica.finish(request_id)
        self.world.settle()

    @precondition(lambda self: self.world.held())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A replica gives a request back before it is finished."""
        replica, request_id = data.draw(st.sampled_from(self.world.held()))
        replica.finish(request_id, "abort")
        self.world.settle()

    @precondition(lambda self: self.world.held())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """An engine cannot run a request."""
        replica, request_id = data.draw(st.sampled_from(self.world.held()))
        replica.finish(request_id, "error")
        self.world.settle()

    @rule(index=st.integers(0, 1))
    def lose(self, index: int) -> None:
        """A producer dies, and comes back."""
        self.world.lose(index)

    @rule(moods=st.lists(st.sampled_from((ValueError("boom"), None, math.nan, 1.0, 1.0, 1.0)), max_size=4))
    def spoil_rewards(self, moods: list[object]) -> None:
        """The next rewards fail, are no numbers, or are equal."""
        self.world.reward.moods.extend(moods)

    @rule(seconds=st.sampled_from((1.0, 20.0, TIMEOUT_SECONDS)))
    def wait(self, seconds: float) -> None:
        """Time goes by; deadlines pass."""
        self.world.settle(seconds)

    # -- trainer ----------------------------------------

    @precondition(lambda self: self.world.may_train)
    @rule()
    def train(self) -> None:
        self.world.train()

    @precondition(lambda self: self.world.may_capture)
    @rule()
    def capture(self) -> None:
        self.world.capture()

    @precondition(lambda self: self.world.published != self.world.captured)
    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(lambda self: self.world.may_save)
    @rule()
    def save(self) -> None:
        self.world.save()

    @precondition(lambda self: self.world.cut is not None and self.world.step > 0)
    @rule(threshold=st.sampled_from((None, None, *THRESHOLDS)))
    def crash(self, threshold: float | None) -> None:
        """Everything dies; the next life may have another capacity."""
        if threshold is not None:
            self.world.settings["async_training"]["staleness_threshold"] = threshold
        self.world.crash()

    # -- laws ----------------------------------------

    @invariant()
    def ledgers_add_up(self) -> None:
        rollout, queue = self.world.statistics()
        assert queue.put == queue.taken + sum(queue.dropped.values()) + queue.size
        assert rollout.admitted == rollout.failed + rollout.taken + rollout.outstanding
        ledger = self.world.ledger
        assert ledger.errors() == []
        assert ledger.open == rollout.outstanding + len(self.world.batcher.held)
        assert ledger.admitted - ledger.trained - ledger.failed - sum(ledger.dropped.values()) == ledger.open
        assert ledger.trained == len(self.world.trained) == self.world.step * self.world.config.required_samples

    @invariant()
    def no_more_are_on_their_way_than_allowed(self) -> None:
        config, (rollout, queue) = self.world.config, self.world.statistics()
        threshold = Fraction(str(config.async_training.staleness_threshold))
        exact = config.required_samples * (1 + threshold) * config.async_training.trigger_parameter_sync_step
        assert rollout.allowed == math.floor(exact)
        most = max(rollout.allowed, self.world.restored)  # a resumed life may allow fewer than it is left with
        assert rollout.outstanding <= most
        if self.policy != "wait":  # which has room made for the batch that takes what is old
            per_version = config.required_samples * config.async_training.trigger_parameter_sync_step
            most = max(rollout.allowed, self.world.restored + per_version)
            assert rollout.used <= most
            if self.world.published is not None:  # and so the trainer never takes tokens staler than it asked for
                ended = rollout.failed + rollout.dropped + self.world.trained_at[self.world.published]
                assert rollout.admitted - ended <= most
        if self.world.published is not None:
            assert rollout.outstanding <= rollout.used
        assert queue.size <= queue.capacity

    @invariant()
    def no_trained_token_is_beyond_the_bound(self) -> None:
        for one in self.world.trained[-self.world.config.required_samples :]:
            responses = zip(one.sample.responses, one.mask, strict=True)
            lags = [
                (self.lag(version, one.captured.n), kept)
                for response, mask in responses
                for version, kept in zip(response.versions, mask, strict=True)
            ]
            assert all(lag >= 0 for lag, _ in lags)
            if self.policy in ("wait", "drop"):
                assert max(lag for lag, _ in lags) <= self.bound
            if self.policy == "mask":
                assert all(bool(kept) == (lag <= self.bound) for lag, kept in lags)

    @staticmethod
    def lag(packed: int, captured: int) -> int:
        return captured - (packed & ((1 << 40) - 1))

    @invariant()
    def every_prompt_is_trained_once_an_epoch(self) -> None:
        assert set(self.world.prompts_trained().values()) <= {1}

    @invariant()
    def groups_are_whole_or_reduced_by_policy(self) -> None:
        n, policy = self.world.config.rollout.n, self.world.config.rollout.group_policy
        sizes = {len(one.sample.responses) for one in self.world.trained}
        assert sizes <= ({n} if policy == "retry" else set(range(2, n + 1)))

    def teardown(self) -> None:
        """From any state the run comes to its end, and nothing is left over."""
        if hasattr(self, "world"):
            try:
                self._finish(self.world)
            finally:
                self.world.close()

    def _finish(self, world: SampleWorld) -> None:
        world.reward.moods.clear()
        for _ in range(1000):
            if world.is_over:
                break
            if world.published != world.captured:
                world.publish()
            elif world.may_capture:
                world.capture()
            elif world.may_train:
                world.train()
            for replica, request_id in world.held():
                replica.finish(request_id)
            world.settle()
        assert world.is_over, "the run is stuck"
        self.ledgers_add_up()
        self.no_trained_token_is_beyond_the_bound()
        if world.config.async_training.lag_policy != "drop":
            assert world.ledger.open == 0


Samples.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestSamples = Samples.TestCase
