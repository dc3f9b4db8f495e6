"""The arithmetic reward scores exactly, and fails for one response at a time."""

from __future__ import annotations

import asyncio
import math
import pickle

import pytest

from paceline.core.errors import RewardError
from paceline.core.sample import Prompt
from paceline.reward.arithmetic_reward import ArithmeticReward

PROMPT = Prompt("3:47+85", "47+85=", (1, 2, 3), "132", "arithmetic")


@pytest.mark.parametrize(("text", "reward"), [("132", 1.0), ("122", 0.0), ("", 0.0), ("1320", 0.0), ("-132", 0.0)])
def test_exact_match(text: str, reward: float) -> None:
    assert asyncio.run(ArithmeticReward().score(PROMPT, text)) == reward


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(value: float) -> None:
    with pytest.raises(RewardError, match=r"prompt 3:47\+85 is .*, not a finite number"):
        asyncio.run(ArithmeticReward(lambda text, answer: value).score(PROMPT, "132"))


def test_a_failing_scorer_is_a_reward_error_with_its_cause() -> None:
    def fail(text: str, answer: str) -> float:
        raise KeyError(answer)

    with pytest.raises(RewardError, match=r"prompt 3:47\+85 failed: KeyError: '132'") as caught:
        asyncio.run(ArithmeticReward(fail).score(PROMPT, "132"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message
