"""What reward functions measured beside the score, averaged over the responses of an update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paceline.core.sample import Response


def reward_metrics(responses: Iterable[Response]) -> dict[str, float]:
    """`reward/<name>/mean` of every metric, over the responses that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for response in responses:
        for name, value in response.reward_metrics.items():
            values[name].append(value)
    return {f"reward/{name}/mean": sum(measured) / len(measured) for name, measured in sorted(values.items())}
