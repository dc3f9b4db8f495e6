"""The losses by hand on both sides of both bounds, against formulas written again in NumPy, and values that must not
spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.algo.policy_loss import TokenLoss, cispo_loss, gspo_loss, ppo_loss

Floats = NDArray[np.float64]
LOW, HIGH, C = 0.2, 0.28, 3.0
ONE_SEQUENCE = torch.zeros(2, dtype=torch.int64)


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor) -> TokenLoss:
    return ppo_loss(logprobs, old, advantages, mask, clip_low=LOW, clip_high=HIGH, clip_c=C)


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor) -> TokenLoss:
    return gspo_loss(logprobs, old, advantages, mask, sequences, clip_low=LOW, clip_high=HIGH)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor) -> TokenLoss:
    return cispo_loss(logprobs, old, advantages, mask, clip_low=LOW, clip_high=HIGH)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], TokenLoss]
LOSSES: dict[str, Loss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def with_gradient(
    loss: Loss, ratios: list[float], advantages: list[float], mask: list[int]
) -> tuple[TokenLoss, Tensor]:
    """The loss of one sequence with these ratios, and the gradient of its sum for the log-probs."""
    old = torch.linspace(-2.0, -0.5, len(ratios))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    sequences = torch.zeros(len(ratios), dtype=torch.int64)
    found = loss(logprobs, old, torch.tensor(advantages), torch.tensor(mask), sequences)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return found, logprobs.grad


def test_ppo_by_hand() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.2, 5.0]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, -3.0, -1.0]
    found, gradient = with_gradient(ppo, ratios, advantages, [1] * 7)
    # Token 1 is clipped from above (1.28), token 4 from below (0.8); 2 and 3 are on their pessimistic side; the last is
    # bad and so much likelier that the dual clip bounds it.
    assert found.loss.tolist() == pytest.approx([-2.0, -1.28, 1.5, -0.5, 0.8, 3.6, 3.0], rel=1e-5)
    assert gradient.tolist() == pytest.approx([-2.0, 0.0, 1.5, -0.5, 0.0, 3.6, 0.0], rel=1e-5)
    assert found.clipped.tolist() == [False, True, False, False, True, False, False]
    assert found.clipped_lower.tolist() == [False] * 6 + [True]


def test_without_the_dual_clip_a_bad_token_is_not_bounded() -> None:
    def unbounded(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor) -> TokenLoss:
        return ppo_loss(logprobs, old, advantages, mask, clip_low=LOW, clip_high=HIGH, clip_c=None)

    found, gradient = with_gradient(unbounded, [5.0, 5.0], [-1.0, 1.0], [1, 1])
    assert found.loss.tolist() == pytest.approx([5.0, -1.28])
    assert gradient.tolist() == pytest.approx([5.0, 0.0])


def test_cispo_by_hand() -> None:
    # Weights 1, 1.28 (from 1.5) and 0.8 (from 0.5): constants, so the gradient is -weight * advantage at every token.
    found, gradient = with_gradient(cispo, [1.0, 1.5, 0.5], [2.0, 1.0, -1.0], [1, 1, 1])
    logprobs = [-2.0, -1.25 + math.log(1.5), -0.5 + math.log(0.5)]
    weights = [2.0, 1.28, -0.8]
    assert found.loss.tolist() == pytest.approx(
        [-w * logprob for w, logprob in zip(weights, logprobs, strict=True)], rel=1e-5
    )
    assert gradient.tolist() == pytest.approx([-w for w in weights], rel=1e-5)
    assert found.clipped.tolist() == [False, True, True]


def test_gspo_by_hand() -> None:
    # One ratio, the geometric mean sqrt(1.21 * 1.0) = 1.1: within the clip, whatever its tokens are.
    found, gradient = with_gradient(gspo, [1.21, 1.0], [2.0, 2.0], [1, 1])
    assert found.loss.tolist() == pytest.approx([-2.2, -2.2], rel=1e-5)
    assert gradient.tolist() == pytest.approx([-2.2, -2.2], rel=1e-5)
    # sqrt(4 * 1) = 2 is above 1.28: clipped, no token has a gradient.
    found, gradient = with_gradient(gspo, [4.0, 1.0], [1.0, 1.0], [1, 1])
    assert found.loss.tolist() == pytest.approx([-1.28, -1.28], rel=1e-5)
    assert gradient.tolist() == [0.0, 0.0]
    assert found.clipped.tolist() == [True, True]


def reference(name: str, logp: Floats, old: Floats, gain: Floats, mask: NDArray[Any], sequences: NDArray[Any]) -> float:
    """Sum of the losses of the tokens in the mask, token by token, in float64."""
    total = 0.0
    for i in range(len(logp)):
        if not mask[i]:
            continue
        ratio = math.exp(logp[i] - old[i])
        if name == "gspo":
            mine = [j for j in range(len(logp)) if sequences[j] == sequences[i] and mask[j]]
            ratio = math.exp(sum(logp[j] - old[j] for j in mine) / len(mine))
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        if name == "cispo":
            total -= clipped * gain[i] * logp[i]
            continue
        loss = max(-gain[i] * ratio, -gain[i] * clipped)
        total += min(loss, -gain[i] * C) if name == "ppo" and gain[i] < 0 else loss
    return total


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_those_of_the_formulas(name: str, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    old = numbers.normal(-2, 0.7, 24)
    logp, gain = old + numbers.normal(0, 0.6, 24), numbers.normal(0, 1, 24)
    mask, sequences = numbers.integers(0, 2, 24), np.repeat(np.arange(4), 6)
    found = LOSSES[name](
        torch.tensor(logp), torch.tensor(old), torch.tensor(gain), torch.tensor(mask), torch.tensor(sequences)
    )
    assert found.loss.sum().item() == pytest.approx(reference(name, logp, old, gain, mask, sequences), rel=1e-12)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    numbers = np.random.default_rng(9)
    old = numbers.normal(-2, 0.7, 8)
    logp, sequences = old + numbers.normal(0, 0.2, 8), np.repeat(np.arange(2), 4)
    gain = np.repeat(numbers.normal(0, 1, 2), 4)  # all tokens of a response have its advantage
    leaf = torch.tensor(logp, requires_grad=True)
    ones = np.ones(8)
    LOSSES[name](
        leaf, torch.tensor(old), torch.tensor(gain), torch.tensor(ones), torch.tensor(sequences)
    ).loss.sum().backward()  # type: ignore[no-untyped-call]
    step = 1e-6
    slopes = []
    for i in range(8):
        up, down = logp.copy(), logp.copy()
        up[i] += step
        down[i] -= step
        high, low = (reference(name, at, old, gain, ones, sequences) for at in (up, down))
        slopes.append((high - low) / (2 * step))
    assert leaf.grad is not None
    expected = np.array(slopes)
    assert leaf.grad.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert np.abs(expected).sum() > 1


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_spreads(loss: Loss, junk: float) -> None:
    logprobs = torch.tensor([-1.0, junk], requires_grad=True)
    old, advantages = torch.tensor([-1.0, junk]), torch.tensor([1.0, junk])
    found = loss(logprobs, old, advantages, torch.tensor([1, 0]), ONE_SEQUENCE)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    expected = 1.0 if loss is cispo else -1.0  # CISPO's value is -log-prob, the others' is -ratio
    assert found.loss.tolist() == [expected, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_impossible_token_with_advantage_zero_is_not_nan(loss: Loss) -> None:
    old, impossible = torch.tensor([-1.0, -1.0]), torch.tensor([-math.inf, -1.0])
    for logprobs, other in ((old, impossible), (impossible, old)):
        found = loss(logprobs, other, torch.zeros(2), torch.ones(2), ONE_SEQUENCE)
        assert found.loss.tolist() == [0.0, 0.0]
        assert bool(torch.isfinite(found.ratio).all())
