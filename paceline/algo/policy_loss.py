"""Losses of the policy per token: clipped PPO, GSPO, CISPO.

Law: a token outside the mask adds exactly 0 to the loss and to the gradient, whatever its values are. The old policy
is whatever the caller says it is: the rollout's distribution (bypass) or a proximal one (decoupled PPO).

All arguments have one shape, [N]: `logprobs` (of the trained policy, nats, carries the gradient), `old_logprobs`,
`advantages`, and `loss_mask` (bool or 0/1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.algo.sequence_sums import sequence_sum

# exp of it is finite in float32 and so is its square: an advantage of 0 times a ratio stays 0.
LOG_RATIO_LIMIT: Final = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss per token, and of each token whether its clip was in force (`clipped`), or the bound on bad tokens
    (`clipped_lower`). `ratio` is the probability ratio that was used; only `loss` carries a gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).

    PPO, arXiv 1707.06347, equation 7, with the bounds apart as in DAPO, arXiv 2503.14476, section 3.1. Where A < 0 the
    loss is at most -A clip_c (dual clip, arXiv 1912.09729); None leaves it unbounded. The log of the ratio
    is held within +-20, where its gradient is 0.
    """
    counted, gain = _selected(advantages, loss_mask)
    ratio = _ratio(_log_ratio(logprobs, old_logprobs, counted))
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(counted)
    if clip_c is not None:
        most = -gain * clip_c
        bounded = (gain < 0) & (loss > most)
        loss = torch.where(bounded, most, loss)
    return TokenLoss(loss, ratio.detach(), (clipped > unclipped).detach(), bounded.detach())


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequences: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """PPO's clip on one ratio per sequence: the geometric mean of those of its tokens in the mask.

    GSPO, arXiv 2507.18071, in the form per token of section 4.3: its value is that of the sequence, its gradient
    reaches each token with that token's own weight. `sequences` [N] numbers the sequence of each token.
    """
    counted, gain = _selected(advantages, loss_mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, counted).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = sequence_sum(counted.to(log_ratio.dtype), sequences).clamp_min(1.0)
    mean = (sequence_sum(log_ratio.detach(), sequences) / tokens).where(counted, 0.0)
    ratio = _ratio(mean + log_ratio - log_ratio.detach())
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        torch.maximum(unclipped, clipped), ratio.detach(), (clipped > unclipped).detach(), torch.zeros_like(counted)
    )


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-clip(r, 1 - clip_low, 1 + clip_high) A logprobs, the clipped ratio a constant: every token has a gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1.
    """
    counted, gain = _selected(advantages, loss_mask)
    ratio = _ratio(_log_ratio(logprobs, old_logprobs, counted)).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # Selected: an impossible token (log-prob -infinity) with advantage 0 has loss 0, not NaN.
    loss = -torch.where(counted & (gain != 0), weight * gain * logprobs, 0.0)
    return TokenLoss(loss, ratio, counted & (weight != ratio), torch.zeros_like(counted))


def _selected(advantages: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    # Selected, not multiplied by the mask: 0 times NaN or infinity is NaN, forwards and backwards.
    counted = loss_mask.bool()
    return counted, torch.where(counted, advantages, 0.0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, logprobs - old_logprobs, 0.0)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
