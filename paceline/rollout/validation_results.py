"""What a validation measured: scores of all responses, folded into figures per data source.

Names are verl's: `val-core/<data_source>/acc/mean@n` is the mean over all responses, `val-core/<data_source>/acc/
best@n/mean` that over prompts of the best of n responses, `val-aux/<data_source>/<metric>/mean@n` has what else the
reward function measured. `acc` is the metric of this name where the function gives one, else its score. verl estimates
best@n by resampling the n responses; here it is their maximum. A response that cannot be scored counts as 0, and is
counted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.errors import RewardError
from paceline.core.ports import TextDecoder
from paceline.core.sample import Completion, Prompt, Score
from paceline.rollout.bounded_reward import BoundedReward

ACC = "acc"


class ValidationResults(NamedTuple):
    """`accuracy` is the mean of `acc` over all responses."""

    accuracy: float
    metrics: dict[str, float]


async def score_all(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    reward: BoundedReward,
    decoder: TextDecoder,
    at_once: int,
) -> list[Score | None]:
    """The score of each completion; `prompts` has the prompt of each. None: it cannot be scored.

    Raises:
        RewardError: none can.
    """
    places = asyncio.Semaphore(at_once)
    errors: list[RewardError] = []

    async def score(prompt: Prompt, completion: Completion) -> Score | None:
        async with places:
            try:
                return await reward.score(prompt, decoder.decode(completion.token_ids))
            except RewardError as error:
                errors.append(error)
                return None

    scores = await asyncio.gather(*map(score, prompts, completions))
    if len(errors) == len(scores):
        raise errors[0]
    return list(scores)


def fold(prompts: Sequence[Prompt], scores: Sequence[Score | None], n: int) -> ValidationResults:
    """Figures of `len(prompts)` prompts; `scores` has the `n` responses of each, prompt by prompt."""
    by_source: defaultdict[str, list[list[Score | None]]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_source[prompt.data_source].append(list(scores[index * n : (index + 1) * n]))
    metrics: dict[str, float] = {}
    for source, groups in sorted(by_source.items()):
        metrics.update(_of_source(source, groups, n))
    return ValidationResults(_mean([_acc(score) for score in scores]), metrics)


def _of_source(source: str, groups: Sequence[Sequence[Score | None]], n: int) -> dict[str, float]:
    core = f"val-core/{source}/{ACC}"
    metrics = {f"{core}/mean@{n}": _mean([_acc(score) for group in groups for score in group])}
    if n > 1:
        metrics[f"{core}/best@{n}/mean"] = _mean([max(_acc(score) for score in group) for group in groups])
    values: defaultdict[str, list[float]] = defaultdict(list)
    failed = 0
    for score in (score for group in groups for score in group):
        failed += score is None
        for name, value in score.metrics.items() if score is not None else ():
            values[name].append(value)
    for name, measured in sorted(values.items()):
        if name != ACC:
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = _mean(measured)
    if failed:
        metrics[f"val-aux/{source}/rewards_failed"] = float(failed)
    return metrics


def _acc(score: Score | None) -> float:
    return 0.0 if score is None else score.metrics.get(ACC, score.value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
