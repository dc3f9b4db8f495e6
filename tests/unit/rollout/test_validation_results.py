"""Figures of a validation against values made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline.core.errors import RewardError
from paceline.core.sample import Completion, Prompt, Score
from paceline.core.sections.reward import RewardConfig
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.validation_results import fold, score_all


def prompts(*sources: str) -> list[Prompt]:
    return [Prompt(f"v{index}", "?", (1,), "", source) for index, source in enumerate(sources)]


def test_means_and_bests_per_data_source() -> None:
    values = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    results = fold(prompts("sums", "gsm8k", "sums"), [Score(value) for value in values], 2)
    assert results.accuracy == 0.5
    assert results.metrics == {
        "val-core/gsm8k/acc/mean@2": 1.0,
        "val-core/gsm8k/acc/best@2/mean": 1.0,
        "val-core/sums/acc/mean@2": 0.25,
        "val-core/sums/acc/best@2/mean": 0.5,
    }


def test_one_response_has_a_mean_alone() -> None:
    results = fold(prompts("sums", "sums"), [Score(1.0), Score(0.0)], 1)
    assert results == (0.5, {"val-core/sums/acc/mean@1": 0.5})


def test_acc_is_the_functions_own_where_it_has_one() -> None:
    scores = [Score(-3.0, {"acc": 1.0, "length": 4.0}), Score(-1.0, {"acc": 0.0, "length": 8.0, "rare": 5.0})]
    results = fold(prompts("sums", "sums"), scores, 1)
    assert results.accuracy == 0.5
    assert results.metrics == {
        "val-core/sums/acc/mean@1": 0.5,
        "val-aux/sums/length/mean@1": 6.0,
        "val-aux/sums/rare/mean@1": 5.0,
    }


def test_a_response_without_a_score_counts_as_wrong_and_is_counted() -> None:
    results = fold(prompts("sums"), [Score(1.0), None], 2)
    assert results.metrics == {
        "val-core/sums/acc/mean@2": 0.5,
        "val-core/sums/acc/best@2/mean": 1.0,
        "val-aux/sums/rewards_failed": 1.0,
    }


class Picky:
    """Fails for some prompts; counts its calls under way."""

    def __init__(self, bad: set[str]) -> None:
        self._bad = bad
        self._now = self.most = 0

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if prompt.prompt_id in self._bad:
            raise RewardError(f"no score for {prompt.prompt_id}")
        return float(response_text)


class Digits:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))


def score(reward: Picky, count: int) -> list[Score | None]:
    asked = prompts(*["t"] * count)
    completions = [Completion(str(index), [index], [0.0], [0], "stop") for index in range(count)]
    bounded = BoundedReward(RewardConfig(num_workers=100), reward)
    return asyncio.run(score_all(asked, completions, reward=bounded, decoder=Digits(), at_once=3))


def test_all_are_scored_a_few_at_a_time_and_one_may_fail() -> None:
    reward = Picky({"v1"})
    assert score(reward, 8) == [Score(0.0), None, *(Score(float(index)) for index in range(2, 8))]
    assert reward.most == 3


def test_when_none_can_be_scored_the_first_reason_is_raised() -> None:
    with pytest.raises(RewardError, match="no score for v0"):
        score(Picky({"v0", "v1"}), 2)
