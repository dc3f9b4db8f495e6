"""Corrections for tokens that another policy sampled: truncated importance weights, and bounds that take tokens out.

The ratio is that of a proximal policy (or of the trained one at the start of its update) to the rollout's: the two
differ where versions lag and where two programs compute the same weights differently. Weights and masks are constants
of the loss; none carries a gradient. All tensors are [N], flat over the tokens of whole sequences.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from paceline.algo.sequence_sums import sequence_sum

IsLevel = Literal["token", "sequence"]
RsLevel = Literal["token", "sequence", "geometric"]

LOG_LIMIT: Final = 20.0


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequences: Tensor,
    *,
    level: IsLevel,
    threshold: float,
) -> Tensor:
    """min(ratio, threshold) at each token; 1 outside the mask.

    - "token": exp of the token's own log ratio (truncated importance sampling, Ionides 2008; for RL on samples of
      another engine: https://fengyao.notion.site/off-policy-rl);
    - "sequence": exp of the sum over the sequence's tokens in the mask, the same at each of them.

    The threshold is at least 1 in any sensible use: the weight only ever shrinks.
    """
    counted = loss_mask.bool()
    log_ratio = _log_ratio(logprobs, rollout_logprobs, counted)
    total = log_ratio if level == "token" else sequence_sum(log_ratio, sequences)
    weights = total.clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=threshold)
    return weights.where(counted, 1.0)


def accepted(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequences: Tensor,
    *,
    level: RsLevel,
    lower: float,
    upper: float,
) -> Tensor:
    """The part of the mask (bool) whose ratio lies within [lower, upper].

    - "token": each token by its own ratio (masked importance sampling; IcePop, arXiv 2510.18855);
    - "sequence": all tokens of a sequence by the product of their ratios;
    - "geometric": all tokens of a sequence by the geometric mean of their ratios, which does not grow with length.
    """
    counted = loss_mask.bool()
    log_ratio = _log_ratio(logprobs, rollout_logprobs, counted)
    if level != "token":
        log_ratio = sequence_sum(log_ratio, sequences)
    if level == "geometric":
        log_ratio = log_ratio / sequence_sum(counted.to(log_ratio.dtype), sequences).clamp_min(1.0)
    ratio = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    return counted & (ratio >= lower) & (ratio <= upper)


def _log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, logprobs.detach() - rollout_logprobs, 0.0)
