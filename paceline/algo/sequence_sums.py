"""Sums over the tokens of each sequence, for tokens that lie flat in one tensor."""

from __future__ import annotations

from torch import Tensor


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """At each token, the sum of `values` over its sequence.

    Args:
        values: [N], float.
        sequences: [N], int64, the number of the sequence that a token belongs to, from 0.
    """
    if not values.numel():
        return values
    totals = values.new_zeros(int(sequences.max()) + 1).index_add(0, sequences, values)
    return totals.index_select(0, sequences)
