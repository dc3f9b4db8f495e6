"""Places, deadline and a checked answer for any reward function; on the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.core.errors import RewardError
from paceline.core.sample import Prompt, Score
from paceline.core.sections.reward import RewardConfig
from paceline.rollout.bounded_reward import BoundedReward
from paceline.testing.virtual_clock import VirtualClock, run_virtual

PROMPT = Prompt("p", "?", (1,), "42", "t")


class Answers:
    """Gives what it is told, after so many seconds; an exception is raised."""

    def __init__(self, answer: Any, seconds: float = 0.0) -> None:
        self._answer = answer
        self._seconds = seconds
        self.now = self.most = 0

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.now -= 1
        if isinstance(self._answer, Exception):
            raise self._answer
        answer: float = self._answer
        return answer


def scored(reward: Answers, times: int = 1, **settings: Any) -> tuple[list[Score | str], float]:
    """What so many calls at once gave, and how long they took."""
    results: list[Score | str] = []
    seconds: list[float] = []

    async def main(clock: VirtualClock) -> None:
        bounded = BoundedReward(RewardConfig(**settings), reward)
        calls = (bounded.score(PROMPT, "x") for _ in range(times))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, RewardError):
                results.append(result.message)
            else:
                assert isinstance(result, Score)
                results.append(result)
        seconds.append(clock.now())

    run_virtual(main)
    return results, seconds[0]


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (1, Score(1.0)),
        (Score(0.5, {"format": 1.0}), Score(0.5, {"format": 1.0})),
        (None, "reward: None is not a finite number"),
        ("1", "reward: '1' is not a finite number"),
        (float("nan"), "reward: nan is not a finite number"),
        (Score(float("inf")), "reward: inf is not a finite number"),
        (ValueError("boom"), "reward: ValueError: boom"),
        (RewardError("reward: its process ended"), "reward: its process ended"),
    ],
)
def test_an_answer_is_a_finite_score_or_one_line(answer: object, result: Score | str) -> None:
    assert scored(Answers(answer)) == ([result], 0.0)


def test_a_slow_answer_ends_at_the_deadline() -> None:
    assert scored(Answers(1, seconds=9), timeout_seconds=10.0) == ([Score(1.0)], 9)
    assert scored(Answers(1, seconds=11), timeout_seconds=10.0) == (["reward: no answer within 10 s"], 10)


def test_waiting_for_a_place_is_not_counted() -> None:
    reward = Answers(1, seconds=9)
    results, seconds = scored(reward, times=10, timeout_seconds=10.0, num_workers=2)
    assert results == [Score(1.0)] * 10
    assert (seconds, reward.most) == (45, 2)
