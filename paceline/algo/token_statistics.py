"""What is measured of the tokens of an update: sums that add up over micro-batches to those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from paceline.algo.policy_loss import LOG_RATIO_LIMIT

LAG_PREFIX: Final = "rollout_corr/k3_kl/lag_"
# The means that are always taken.
RATIO_MEANS: Final = ("rollout_corr/kl", "rollout_corr/k3_kl", "actor/logprob_diff_mean")
# Lags from here on share one figure, so that their number is bounded.
HIGHEST_LAG: Final = 8


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over the tokens in the loss.

    `means` and `maxima` are keyed by metric; `weight` and `weight_squared` are sums of the ratio to the rollout's
    distribution; `lags` has tokens and summed k3 per version lag.
    """

    tokens: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    lags: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def plus(self, other: TokenSums) -> TokenSums:
        """The sums of both sets of tokens together."""
        lags = dict(self.lags)
        for lag, (tokens, total) in other.lags.items():
            had = lags.get(lag, (0.0, 0.0))
            lags[lag] = (had[0] + tokens, had[1] + total)
        return TokenSums(
            tokens=self.tokens + other.tokens,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            means={
                name: self.means.get(name, 0.0) + other.means.get(name, 0.0)
                for name in dict.fromkeys([*self.means, *other.means])
            },
            maxima={
                name: max(self.maxima.get(name, 0.0), other.maxima.get(name, 0.0))
                for name in dict.fromkeys([*self.maxima, *other.maxima])
            },
            lags=lags,
        )

    def metrics(self) -> dict[str, float]:
        """Token means and maxima under their names; all 0.0 when there is no token.

        `rollout_corr/rollout_is_eff_sample_size` is the effective share of tokens, mean ratio squared over mean squared
        ratio (Kish), 1 when on-policy.
        """
        count = max(self.tokens, 1.0)
        effective = self.weight**2 / (count * self.weight_squared) if self.weight_squared else 0.0
        return {
            **{name: total / count for name, total in self.means.items()},
            **self.maxima,
            "rollout_corr/rollout_is_eff_sample_size": effective,
            **{_lag_name(lag): total / tokens for lag, (tokens, total) in sorted(self.lags.items()) if tokens},
        }


def _lag_name(lag: int) -> str:
    return f"{LAG_PREFIX}{lag}" if lag < HIGHEST_LAG else f"{LAG_PREFIX}{HIGHEST_LAG}_or_more"


def token_sums(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    lags: Tensor,
    *,
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor],
) -> TokenSums:
    """Sums over the tokens in the mask; values outside it may be anything. All arguments are [N].

    `means` and `maxima` are further figures per token. Always there: `rollout_corr/kl`, the mean of rollout minus
    trainer log-prob; `rollout_corr/k3_kl`, the low-variance estimate (ratio - 1 - log ratio,
    http://joschu.net/blog/kl-approx.html), also per version lag of the token where `lags` (int64) is not negative.
    """
    counted = loss_mask.bool()
    log_ratio = (logprobs.detach() - rollout_logprobs).double()[counted]
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    k3 = ratio - 1.0 - log_ratio
    figures = {
        **dict(zip(RATIO_MEANS, (-log_ratio, k3, log_ratio.abs()), strict=True)),
        **{name: value.detach().double()[counted] for name, value in means.items()},
    }
    highest = {name: value.detach()[counted] for name, value in maxima.items()}
    return TokenSums(
        tokens=float(counted.sum()),
        weight=float(ratio.sum()),
        weight_squared=float(ratio.square().sum()),
        means={name: float(value.sum()) for name, value in figures.items()},
        maxima={name: float(value.max()) if value.numel() else 0.0 for name, value in highest.items()},
        lags=_by_lag(lags[counted], k3),
    )


def _by_lag(lags: Tensor, k3: Tensor) -> dict[int, tuple[float, float]]:
    known = lags >= 0
    if not bool(known.any()):
        return {}
    bounded = lags[known].clamp(max=HIGHEST_LAG)
    tokens, totals = torch.bincount(bounded).tolist(), torch.bincount(bounded, weights=k3[known]).tolist()
    return {lag: (count, total) for lag, (count, total) in enumerate(zip(tokens, totals, strict=True)) if count}
