"""Why samples failed, counted: a reward function that hangs or raises now and then is seen as such at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.core.events import SampleFailed

MOST_REASONS = 20
OTHERS = "(other reasons)"


def failure_reasons(failures: Iterable[SampleFailed]) -> dict[str, int]:
    """Reason -> samples, most frequent first; beyond `MOST_REASONS` they are counted together as `OTHERS`."""
    counts: Counter[str] = Counter()
    for failure in failures:
        counts[failure.error] += len(failure.ids)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = dict(ranked[:MOST_REASONS])
    rest = sum(count for _, count in ranked[MOST_REASONS:])
    return {**shown, OTHERS: rest} if rest else shown
