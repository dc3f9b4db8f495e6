"""How per-token losses become one number, exactly alike in one pass or in many micro-batches.

Law: every mode is a weight per sequence, fixed from the whole batch before the first pass. The loss of a batch is
then the sum of weight times token loss, and sums over micro-batches add up to it, gradients included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def sequence_weights(loss_tokens: Sequence[int], mode: LossAggMode) -> list[float]:
    """Weight of each token of each sequence, given how many tokens of it count in the loss.

    - "token-mean": 1 / all tokens;
    - "seq-mean-token-mean": 1 / (sequences * tokens of the sequence);
    - "seq-mean-token-sum": 1 / sequences.

    A sequence without tokens has weight 0.0 and is not counted among the sequences.
    """
    if mode == "token-mean":
        total = sum(loss_tokens)
        return [1.0 / total if tokens else 0.0 for tokens in loss_tokens]
    sequences = sum(1 for tokens in loss_tokens if tokens)
    if mode == "seq-mean-token-sum":
        return [1.0 / sequences if tokens else 0.0 for tokens in loss_tokens]
    return [1.0 / (sequences * tokens) if tokens else 0.0 for tokens in loss_tokens]


def aggregate(per_token: Tensor, token_weights: Tensor) -> Tensor:
    """Weighted sum, a scalar. Both arguments have one shape; weight 0 takes a token out, even if it is not finite."""
    return torch.where(token_weights > 0, per_token * token_weights, 0.0).sum()
