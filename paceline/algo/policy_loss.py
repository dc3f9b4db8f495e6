"""Clipped policy loss per token, with the rollout's log-probs as those of the old policy (bypass mode).

Law: the ratio is taken against the distribution that the token was sampled from, so nothing is recomputed; a token
outside the mask adds exactly 0 to loss, gradient and statistics, whatever its values are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

# exp of it is finite in float32 and so is its square: an advantage of 0 times a ratio stays 0.
LOG_RATIO_LIMIT: Final = 20.0


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """Sums over the tokens in the loss; they add up over micro-batches to those of the whole batch.

    Example: two tokens with ratios 1.0 and 1.5, the second clipped: `PolicyStatistics(tokens=2, ratio=2.5,
    ratio_squared=3.25, ratio_max=1.5, clipped=1, ...)`.
    """

    tokens: float
    ratio: float
    ratio_squared: float
    ratio_max: float
    clipped: float
    kl: float
    k3_kl: float
    logprob_difference: float

    def plus(self, other: PolicyStatistics) -> PolicyStatistics:
        """The statistics of both sets of tokens together."""
        return PolicyStatistics(
            tokens=self.tokens + other.tokens,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
            ratio_max=max(self.ratio_max, other.ratio_max),
            clipped=self.clipped + other.clipped,
            kl=self.kl + other.kl,
            k3_kl=self.k3_kl + other.k3_kl,
            logprob_difference=self.logprob_difference + other.logprob_difference,
        )

    def metrics(self) -> dict[str, float]:
        """Token means under their metric names; all 0.0 when there is no token.

        `actor/ppo_kl` is the mean of rollout minus trainer log-prob, `rollout_corr/k3_kl` the low-variance estimate
        (ratio - 1 - log ratio, http://joschu.net/blog/kl-approx.html), `rollout_corr/rollout_is_eff_sample_size` the
        effective share of tokens (mean ratio squared over mean squared ratio; 1 when on-policy).
        """
        count = max(self.tokens, 1.0)
        effective = self.ratio**2 / (count * self.ratio_squared) if self.ratio_squared else 0.0
        return {
            "actor/pg_clipfrac": self.clipped / count,
            "actor/ppo_kl": self.kl / count,
            "actor/ratio_mean": self.ratio / count,
            "actor/ratio_max": self.ratio_max,
            "actor/logprob_diff_mean": self.logprob_difference / count,
            "rollout_corr/k3_kl": self.k3_kl / count,
            "rollout_corr/rollout_is_eff_sample_size": effective,
        }


NO_TOKENS: Final = PolicyStatistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, PolicyStatistics]:
    """Per-token loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - rollout_logprobs).

    PPO, arXiv 1707.06347, equation 7, with the bounds apart as in DAPO, arXiv 2503.14476, section 3.1. The log of the
    ratio is held within +-20, where its gradient is 0.

    Args:
        logprobs: of the policy that is trained, float32, any shape, in nats; carries the gradient.
        rollout_logprobs: of the sampled distribution, same shape.
        advantages: same shape.
        loss_mask: same shape, bool or 0/1; where it is 0 the loss is exactly 0.

    Returns:
        The loss per token in the given shape, and the statistics of the tokens in the mask.
    """
    counted = loss_mask.bool()
    # Selected, not multiplied by the mask: 0 times NaN or infinity is NaN, forwards and backwards.
    log_ratio = torch.where(counted, logprobs - rollout_logprobs, 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    gain = torch.where(counted, advantages, 0.0)
    unclipped = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    return loss, _statistics(ratio.detach(), log_ratio.detach(), (clipped > unclipped).detach(), counted)


def _statistics(ratio: Tensor, log_ratio: Tensor, clipped: Tensor, counted: Tensor) -> PolicyStatistics:
    # Outside the mask the ratio is 1 and its log 0, so those sums are corrected by their count alone.
    outside = float((~counted).sum())
    wide = ratio.double()
    sums = torch.stack(
        [
            wide.sum() - outside,
            wide.square().sum() - outside,
            torch.where(counted, wide, 0.0).max() if ratio.numel() else wide.new_zeros(()),
            clipped.sum().double(),
            -log_ratio.double().sum(),
            (wide - 1.0 - log_ratio.double()).sum(),
            log_ratio.abs().double().sum(),
        ]
    ).tolist()
    return PolicyStatistics(float(counted.sum()), *sums)
