"""From a group of responses to sequences: shaped rewards, advantages, lags and the window."""

from __future__ import annotations

import math

import pytest

from paceline.algo.advantage import group_advantages
from paceline.core.version import Version
from tests.unit.train.train_batches import batch_of, response

DR_GRPO: dict[str, object] = {"algorithm.adv_estimator": "dr_grpo"}


def test_advantages_are_those_of_the_group() -> None:
    rewards = [1.0, 0.0, 0.5]
    batch = batch_of([response(2, reward) for reward in rewards], {})
    assert [sequence.advantage for sequence in batch.sequences] == group_advantages(rewards, "grpo")


def test_a_reward_that_is_no_number_takes_its_response_out() -> None:
    batch = batch_of([response(2, 1.0), response(3, math.nan), response(4, 0.0)], DR_GRPO)
    assert [(len(s.response_ids), s.advantage) for s in batch.sequences] == [(2, 0.5), (4, -0.5)]


def test_lags_are_per_token_and_the_window_is_the_captured_version() -> None:
    batch = batch_of([response(3, 1.0, [1, 3, 4]), response(2, 0.0, [4, 4])], {}, captured=4)
    assert [sequence.lags for sequence in batch.sequences] == [[3, 1, 0], [0, 0]]
    assert batch.window == Version(1, 4).packed


def test_long_responses_lose_reward_before_advantages_are_taken() -> None:
    # Limit 8, buffer 4, factor 2: lengths 4, 6 and 8 cost 0, 1 and 2; rewards 1, 1, 0 become 1, 0, -2.
    settings = {
        **DR_GRPO,
        "data.max_response_length": 8,
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 4,
        "reward.overlong_buffer.penalty_factor": 2.0,
    }
    batch = batch_of([response(4, 1.0), response(6, 1.0), response(8, 0.0)], settings)
    mean = -1 / 3
    assert [s.advantage for s in batch.sequences] == pytest.approx([1 - mean, 0 - mean, -2 - mean])
