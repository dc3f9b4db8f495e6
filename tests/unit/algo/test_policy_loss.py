"""The clipped loss by hand on both sides of both bounds, and values that must not spread."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.algo.policy_loss import NO_TOKENS, PolicyStatistics, policy_loss


def loss_of(ratios: list[float], advantages: list[float], mask: list[int]) -> tuple[Tensor, PolicyStatistics, Tensor]:
    """Loss, statistics and the gradient of the summed loss for the log-probs, with clip bounds 0.8 and 1.28."""
    rollout = torch.linspace(-2.0, -0.5, len(ratios))
    logprobs = (rollout + torch.tensor(ratios).log()).requires_grad_()
    loss, statistics = policy_loss(
        logprobs, rollout, torch.tensor(advantages), torch.tensor(mask), clip_low=0.2, clip_high=0.28
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.detach(), statistics, logprobs.grad


def test_loss_and_gradient_by_hand() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.2]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, -3.0]
    loss, statistics, gradient = loss_of(ratios, advantages, [1] * 6)
    # Token 1 is clipped from above (1.28), token 4 from below (0.8); 2 and 3 are on their pessimistic side.
    assert loss.tolist() == pytest.approx([-2.0, -1.28, 1.5, -0.5, 0.8, 3.6], rel=1e-5)
    assert gradient.tolist() == pytest.approx([-2.0, 0.0, 1.5, -0.5, 0.0, 3.6], rel=1e-5)
    assert statistics.metrics()["actor/pg_clipfrac"] == pytest.approx(2 / 6)


def test_statistics_by_hand() -> None:
    # The third token is outside the mask.
    _, statistics, _ = loss_of([1.0, 1.5, 7.0], [1.0, 1.0, 1.0], [1, 1, 0])
    log = math.log(1.5)
    assert statistics.metrics() == pytest.approx(
        {
            "actor/pg_clipfrac": 0.5,
            "actor/ppo_kl": -log / 2,
            "actor/ratio_mean": 1.25,
            "actor/ratio_max": 1.5,
            "actor/logprob_diff_mean": log / 2,
            "rollout_corr/k3_kl": (1.5 - 1 - log) / 2,
            "rollout_corr/rollout_is_eff_sample_size": 2.5**2 / (2 * 3.25),
        },
        rel=1e-5,
    )


def test_statistics_of_parts_add_up() -> None:
    ratios, advantages, mask = [1.0, 1.5, 0.5, 0.9], [1.0, -1.0, 2.0, 1.0], [1, 0, 1, 1]
    whole = loss_of(ratios, advantages, mask)[1]
    first, second = (loss_of(ratios[part], advantages[part], mask[part])[1] for part in (slice(0, 1), slice(1, 4)))
    assert NO_TOKENS.plus(first).plus(second).metrics() == pytest.approx(whole.metrics(), rel=1e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_spreads(junk: float) -> None:
    logprobs = torch.tensor([-1.0, junk], requires_grad=True)
    loss, statistics = policy_loss(
        logprobs,
        torch.tensor([-1.0, junk]),
        torch.tensor([1.0, junk]),
        torch.tensor([1, 0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.tolist() == [-1.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert statistics.metrics()["actor/ratio_mean"] == 1.0
    assert statistics.tokens == 1.0


def test_an_impossible_token_with_advantage_zero_is_not_nan() -> None:
    loss, statistics = policy_loss(
        torch.tensor([-1.0]),
        torch.tensor([-math.inf]),
        torch.tensor([0.0]),
        torch.tensor([1]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert loss.tolist() == [0.0]
    assert math.isfinite(statistics.ratio_squared)


def test_no_token_at_all() -> None:
    assert set(NO_TOKENS.metrics().values()) == {0.0}
    _, statistics, _ = loss_of([3.0, 2.0], [1.0, 1.0], [0, 0])
    assert set(statistics.metrics().values()) == {0.0}
