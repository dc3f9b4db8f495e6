"""Estimators of the divergence by hand, and in the mean over a small vocabulary against the divergence itself."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algo.kl_penalty import KlEstimator, kl_penalty

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64)
DIVERGENCE = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_by_hand(estimator: KlEstimator, expected: float) -> None:
    # The policy gives the token twice the probability that the reference gives it.
    found = kl_penalty(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), torch.ones(1), estimator)
    assert found.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_sampled_tokens_is_the_divergence(estimator: KlEstimator) -> None:
    mean = (P * kl_penalty(P.log(), Q.log(), torch.ones(3), estimator)).sum().item()
    assert mean == pytest.approx(DIVERGENCE)


def test_the_gradient_of_k2_is_that_of_the_divergence() -> None:
    # In the mean over tokens that the policy samples; the samples themselves are constants.
    logits = P.log().clone().requires_grad_()
    (P * kl_penalty(logits.log_softmax(0), Q.log(), torch.ones(3), "k2")).sum().backward()  # type: ignore[no-untyped-call]
    found = logits.grad
    again = P.log().clone().requires_grad_()
    log_p = again.log_softmax(0)
    (log_p.exp() * (log_p - Q.log())).sum().backward()  # type: ignore[no-untyped-call]
    assert found is not None
    assert again.grad is not None
    torch.testing.assert_close(found, again.grad)
    assert found.abs().sum() > 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_nothing_outside_the_mask_spreads(estimator: KlEstimator, junk: float) -> None:
    logprobs = torch.tensor([-1.0, junk], requires_grad=True)
    found = kl_penalty(logprobs, torch.tensor([-1.5, -1.0]), torch.tensor([1, 0]), estimator)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found[1].item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad[1].item() == 0.0
    assert math.isfinite(logprobs.grad[0].item())
