"""The rollouter over data and rewards that misbehave: prompts that come late, responses without a score."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from paceline.core.config import build_config
from paceline.core.errors import DeadlineExceeded
from paceline.core.events import GroupReduced, SampleFailed
from paceline.core.sample import Prompt
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.rollout.test_rollouter import PickyReward, Prompts, Rig, config, train_to_the_end, with_rig


class LatePrompts(Prompts):
    """Has none before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = False

    def next_prompt(self) -> Prompt | None:  # type: ignore[override]
        return super().next_prompt() if self.is_there else None


def test_prompts_that_are_still_being_made_hold_nobody_up_and_are_waited_for() -> None:
    async def scenario(rig: Rig) -> None:
        assert isinstance(rig.prompts, LatePrompts)
        await rig.publish(0)
        await rig.clock.sleep(5)
        assert rig.admitted() == 0
        rig.prompts.is_there = True
        rig.rollouter.prompts_ready()
        await rig.clock.sleep(1)
        assert rig.admitted() == 9

    with_rig(scenario, prompts=LatePrompts())


def test_prompts_that_never_come_are_named() -> None:
    async def main(clock: VirtualClock) -> None:
        rig = Rig(clock, config(), PickyReward(), LatePrompts())
        fitting = asyncio.ensure_future(rig.rollouter.fit())
        await rig.publish(0)
        with pytest.raises(
            DeadlineExceeded, match="waited 600 s for the next prompt, which is being made: data did not"
        ) as caught:
            await fitting
        assert caught.value.culprit == "data"

    run_virtual(main)


class HalfReward:
    """One of the three responses of every prompt has no score."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._calls[prompt.prompt_id] += 1
        if self._calls[prompt.prompt_id] == 2:
            raise ValueError("boom")
        return 1.0


def test_survivors_of_a_failed_reward_are_trained() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        taken = await train_to_the_end(rig)
        assert [len(sample.responses) for sample in taken] == [2] * 40
        reduced = rig.events.of(GroupReduced)
        assert {event.sample_id for event in reduced} >= {sample.sample_id for sample in taken}
        assert {(event.lacking, event.reason) for event in reduced} == {(1, "reward: ValueError: boom")}
        assert rig.events.of(SampleFailed) == []

    survivors = build_config(
        {
            "actor": {"ppo_mini_batch_size": 8},
            "async_training": {"trigger_parameter_sync_step": 1},
            "rollout": {"n": 3, "group_policy": "survivors", "total_rollout_steps": 40},
        }
    )
    with_rig(scenario, survivors, reward=HalfReward())
