"""How per-token losses become one number, exactly alike in one pass or in many micro-batches.

Law: every mode is a weight per sequence, fixed from the whole batch before the first pass. The loss of a batch is
then the sum of weight times token loss, and sums over micro-batches add up to it, gradients included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def sequence_weights(loss_tokens: Sequence[int], mode: LossAggMode, scale_factor: float | None = None) -> list[float]:
    """Weight of each token of each sequence, given how many tokens of it count in the loss.

    - "token-mean": 1 / all tokens (DAPO, arXiv 2503.14476, section 3.3);
    - "seq-mean-token-mean": 1 / (sequences * tokens of the sequence) (GRPO, arXiv 2402.03300, equation 3);
    - "seq-mean-token-sum": 1 / sequences;
    - "seq-mean-token-sum-norm": 1 / (sequences * `scale_factor`), with a constant, the length limit as a rule, in place
      of each sequence's own length (Dr. GRPO, arXiv 2503.20783, section 3.2).

    A sequence without tokens has weight 0.0 and is not counted among the sequences.
    """
    if mode == "token-mean":
        total = sum(loss_tokens)
        return [1.0 / total if tokens else 0.0 for tokens in loss_tokens]
    sequences = sum(1 for tokens in loss_tokens if tokens)
    if mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        scale = 1.0 if mode == "seq-mean-token-sum" or scale_factor is None else scale_factor
        return [1.0 / (sequences * scale) if tokens else 0.0 for tokens in loss_tokens]
    return [1.0 / (sequences * tokens) if tokens else 0.0 for tokens in loss_tokens]


def aggregate(per_token: Tensor, token_weights: Tensor) -> Tensor:
    """Weighted sum, a scalar. Both arguments have one shape; weight 0 takes a token out, even if it is not finite."""
    return torch.where(token_weights > 0, per_token * token_weights, 0.0).sum()
