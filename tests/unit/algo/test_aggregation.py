"""The three ways of making one number of token losses, by hand and over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.algo.aggregation import LossAggMode, aggregate, sequence_weights
from paceline.algo.policy_loss import ppo_loss

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LONGEST = 5.0
# Three sequences of up to three tokens; the last one has no token in the loss.
LOSSES = torch.tensor([[1.0, 2.0, 6.0], [5.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def token_weights(mode: LossAggMode, mask: Tensor = MASK) -> Tensor:
    return torch.tensor(sequence_weights(mask.sum(1).tolist(), mode, LONGEST))[:, None] * mask


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 14 / 4),
        ("seq-mean-token-mean", (3 + 5) / 2),
        ("seq-mean-token-sum", (9 + 5) / 2),
        ("seq-mean-token-sum-norm", (9 + 5) / 2 / 5),
    ],
)
def test_by_hand(mode: LossAggMode, expected: float) -> None:
    assert aggregate(LOSSES, token_weights(mode)).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_outside_the_mask_may_be_anything(mode: LossAggMode) -> None:
    losses = torch.where(MASK.bool(), LOSSES, math.nan).requires_grad_()
    total = aggregate(losses, token_weights(mode))
    total.backward()  # type: ignore[no-untyped-call]
    assert total.item() == pytest.approx(aggregate(LOSSES, token_weights(mode)).item())
    assert losses.grad is not None
    assert torch.equal(losses.grad, token_weights(mode))


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_have_no_weight(mode: LossAggMode) -> None:
    assert sequence_weights([0, 0], mode) == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_give_the_gradient_of_the_whole_batch(mode: LossAggMode, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, rollout, advantages = (-torch.rand(5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    weights = token_weights(mode, mask)

    def gradient(rows: int) -> Tensor:
        leaf = logprobs.clone().requires_grad_()
        for part in (slice(start, start + rows) for start in range(0, 5, rows)):
            tokens = (leaf[part], rollout[part], advantages[part], mask[part])
            loss = ppo_loss(*tokens, clip_low=0.2, clip_high=0.28, clip_c=None).loss
            aggregate(loss, weights[part]).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(5).abs().sum() > 0
    assert torch.equal(gradient(size), gradient(5))
