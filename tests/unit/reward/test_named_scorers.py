"""The scorers that are called by name: math-verify and reasoning-gym."""

from __future__ import annotations

import pytest

from paceline.dataset.gym_rows import GymRows
from paceline.reward import math_verify_reward, reasoning_gym_reward


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("0.5", "\\boxed{\\frac{1}{2}}", 1.0),
        ("The answer is $x^2+2x+1$.", "$(x+1)^2$", 1.0),
        ("first 3, then \\boxed{42}", "42", 1.0),
        ("42", 42, 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, truth: object, score: float) -> None:
    assert math_verify_reward.compute_score("math", response, truth, {}) == score


def test_a_ground_truth_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(ValueError, match="finds no expression in the ground truth ''"):
        math_verify_reward.compute_score("math", "42", "", {})


def test_a_problem_of_reasoning_gym_is_scored_by_its_data_set() -> None:
    row = GymRows("reasoning_gym:chain_sum?max_terms=3", prompt_key="prompt", chat=False, seed=3).row(5)
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]

    def score(response: str) -> float:
        return reasoning_gym_reward.compute_score(row["data_source"], response, truth, extra)

    assert score(truth) == score(f"so <answer> {truth} </answer>") == score(f" {truth}\n") == 1.0
    assert score("") == score("<answer>no</answer>") == 0.0
    assert 0 < score(f"it is {truth}") < 1  # the data set's own rule for an answer among other words
