"""Quantiles of the summary: the smallest value that at least that share of the values does not exceed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping


def quantile(values: Iterable[float], share: float) -> float | None:
    """Smallest of `values` that at least `share` of them do not exceed; None of nothing.

    Example: the 0.99 quantile of 50 values is their maximum.
    """
    return weighted_quantile(Counter(values), share)


def weighted_quantile(counts: Mapping[float, int], share: float) -> float | None:
    """The same of values that come so many times each."""
    rest = math.ceil(share * sum(counts.values()))
    for value in sorted(counts):
        rest -= counts[value]
        if rest <= 0:
            return value
    return None
