"""KL divergence of the trained policy from a reference, estimated per token from the sampled tokens.

The three estimators of http://joschu.net/blog/kl-approx.html, with log r = reference minus policy log-prob.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

# exp of it is finite, and a policy that far from its reference has other troubles.
LOG_RATIO_LIMIT: Final = 20.0


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate at each token, [N]; exactly 0 outside the mask. The gradient flows through `logprobs`.

    - "k1": -log r, unbiased, may be negative; its gradient has mean 0 on-policy, so it is for watching;
    - "k2": (log r)^2 / 2, biased, whose gradient is that of the reverse KL on-policy;
    - "k3": r - 1 - log r, unbiased, never negative (GRPO's, arXiv 2402.03300, equation 4).
    """
    log_ratio = torch.where(loss_mask.bool(), reference_logprobs - logprobs, 0.0)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return bounded.exp() - 1.0 - bounded
