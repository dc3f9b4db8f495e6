"""Importance weights and bounds by hand, and against products written out token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.algo.rollout_correction import IsLevel, RsLevel, accepted, importance_weights

RATIOS = [1.5, 0.5, 4.0, 1.0, 3.0]
SEQUENCES = torch.tensor([0, 0, 0, 1, 1])
ALL = torch.ones(5)


def pair(ratios: list[float]) -> tuple[Tensor, Tensor]:
    rollout = torch.linspace(-3.0, -1.0, len(ratios), dtype=torch.float64)
    return rollout + torch.tensor(ratios, dtype=torch.float64).log(), rollout


@pytest.mark.parametrize(
    ("level", "expected"), [("token", [1.5, 0.5, 2.0, 1.0, 2.0]), ("sequence", [2.0, 2.0, 2.0, 2.0, 2.0])]
)
def test_weights_by_hand(level: IsLevel, expected: list[float]) -> None:
    # Products: 1.5 * 0.5 * 4 = 3 and 1 * 3 = 3, both truncated at 2.
    found = importance_weights(*pair(RATIOS), ALL, SEQUENCES, level=level, threshold=2.0)
    assert found.tolist() == pytest.approx(expected)


def test_a_token_outside_the_mask_is_in_no_product() -> None:
    mask = torch.tensor([1, 1, 0, 1, 1])
    found = importance_weights(*pair(RATIOS), mask, SEQUENCES, level="sequence", threshold=10.0)
    assert found.tolist() == pytest.approx([0.75, 0.75, 1.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [True, True, False, True, False]),
        ("sequence", [False, False, False, False, False]),
        # Cube root of 3 is 1.44, square root of 3 is 1.73.
        ("geometric", [True, True, True, True, True]),
    ],
)
def test_bounds_by_hand(level: RsLevel, expected: list[bool]) -> None:
    found = accepted(*pair(RATIOS), ALL, SEQUENCES, level=level, lower=0.5 - 1e-9, upper=2.0)
    assert found.tolist() == expected


def test_the_lower_bound_counts_too() -> None:
    found = accepted(*pair(RATIOS), ALL, SEQUENCES, level="token", lower=0.9, upper=10.0)
    assert found.tolist() == [True, False, True, True, True]


def test_nothing_outside_the_mask_is_accepted() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0])
    assert not (accepted(*pair(RATIOS), mask, SEQUENCES, level="geometric", lower=0.0, upper=99.0) & (mask == 0)).any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_those_of_the_formula(level: IsLevel, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    old, rollout = numbers.normal(-2, 1, 20), numbers.normal(-2, 1, 20)
    mask, sequences = numbers.integers(0, 2, 20), np.sort(numbers.integers(0, 4, 20))
    found = importance_weights(
        torch.tensor(old),
        torch.tensor(rollout),
        torch.tensor(mask),
        torch.tensor(sequences),
        level=level,
        threshold=2.0,
    )
    for i in range(20):
        mine = [i] if level == "token" else [j for j in range(20) if sequences[j] == sequences[i] and mask[j]]
        product = math.prod(math.exp(old[j] - rollout[j]) for j in mine)
        assert found[i].item() == pytest.approx(min(product, 2.0) if mask[i] else 1.0)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_outside_the_mask_does_not_spread(junk: float) -> None:
    logprobs, rollout = pair(RATIOS)
    mask = torch.tensor([1, 1, 0, 1, 1])
    broken = torch.where(mask.bool(), logprobs, junk)
    found = importance_weights(broken, rollout, mask, SEQUENCES, level="sequence", threshold=10.0)
    assert torch.equal(found, importance_weights(logprobs, rollout, mask, SEQUENCES, level="sequence", threshold=10.0))


def test_weights_carry_no_gradient() -> None:
    logprobs, rollout = pair(RATIOS)
    found = importance_weights(logprobs.requires_grad_(), rollout, ALL, SEQUENCES, level="token", threshold=2.0)
    assert not found.requires_grad
