"""Advantages of the responses to one prompt, in plain floats.

Law: a group whose rewards are all equal gives exactly 0.0 for each (decided by max == min, never by a rounded
spread), and a reward that is not finite takes its response out of the statistics and out of the loss, and no other
response with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

AdvantageEstimator = Literal["grpo", "dr_grpo", "rloo"]

# Keeps the quotient bounded when rewards differ by little; the reference's value.
STD_EPSILON: Final = 1e-6


def group_advantages(rewards: Sequence[float], estimator: AdvantageEstimator) -> list[float | None]:
    """Advantage of each response of one group; None where the reward is not finite, for the caller to leave out.

    With m and s the mean and the unbiased standard deviation of the finite rewards, n their number:

    - "grpo": (r - m) / (s + 1e-6), DeepSeekMath, arXiv 2402.03300, section 4.1.2;
    - "dr_grpo": r - m, Dr. GRPO, arXiv 2503.20783, section 3.2;
    - "rloo": r minus the mean of the others, which is (r - m) * n / (n - 1), arXiv 2402.14740, section 3.

    Equal rewards, or a single finite one, give 0.0. An empty group gives an empty list.
    """
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if not finite or max(finite) == min(finite):
        return [0.0 if math.isfinite(reward) else None for reward in rewards]
    mean = math.fsum(finite) / len(finite)
    scale = _scale(finite, mean, estimator)
    return [(reward - mean) * scale if math.isfinite(reward) else None for reward in rewards]


def _scale(rewards: Sequence[float], mean: float, estimator: AdvantageEstimator) -> float:
    """The factor on a reward's distance from the mean; at least two different rewards."""
    count = len(rewards)
    if estimator == "dr_grpo":
        return 1.0
    if estimator == "rloo":
        return count / (count - 1)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1)
    return 1.0 / (math.sqrt(variance) + STD_EPSILON)
