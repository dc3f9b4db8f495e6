"""Advantages by hand, and the groups that go wrong: equal rewards, one member, rewards that are no numbers."""

from __future__ import annotations

import math

import pytest

from paceline.algo.advantage import AdvantageEstimator, group_advantages

ESTIMATORS: tuple[AdvantageEstimator, ...] = ("grpo", "dr_grpo", "rloo")


def test_grpo_by_hand() -> None:
    # Mean 1/4, unbiased variance (3/16 * 4) / 3 = 1/4.
    right, *wrong = group_advantages([1.0, 0.0, 0.0, 0.0], "grpo")
    assert right == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-12)
    assert wrong == pytest.approx([-0.25 / (0.5 + 1e-6)] * 3, rel=1e-12)


def test_dr_grpo_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "dr_grpo") == [0.75, -0.25, -0.25, -0.25]


def test_rloo_by_hand() -> None:
    # The others' means: 0, and 1/3 for each of the three.
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 8, [1.0] * 4, [0.0, 0.0], [0.7]])
def test_equal_rewards_and_single_members_give_exactly_zero(
    rewards: list[float], estimator: AdvantageEstimator
) -> None:
    assert group_advantages(rewards, estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_leaves_the_others_as_if_it_were_not_there(
    broken: float, estimator: AdvantageEstimator
) -> None:
    advantages = group_advantages([1.0, 0.0, broken, 1.0], estimator)
    assert advantages[2] is None
    assert [advantages[0], advantages[1], advantages[3]] == group_advantages([1.0, 0.0, 1.0], estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_finite_reward_among_broken_ones_is_a_single_member(estimator: AdvantageEstimator) -> None:
    assert group_advantages([math.nan, 0.5, math.inf], estimator) == [None, 0.0, None]
    assert group_advantages([math.nan, math.nan], estimator) == [None, None]
    assert group_advantages([], estimator) == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_of_a_group_add_up_to_zero(estimator: AdvantageEstimator) -> None:
    advantages = group_advantages([0.3, 1.0, -2.0, 0.25, 0.1], estimator)
    assert sum(value for value in advantages if value is not None) == pytest.approx(0.0, abs=1e-9)
