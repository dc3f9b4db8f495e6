"""Why samples failed, or lost responses, counted: a reward function that hangs or raises now and then is seen at the
end as what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.core.events import GroupReduced, SampleFailed

MOST_REASONS = 20
OTHERS = "(other reasons)"


def failure_reasons(failures: Iterable[SampleFailed]) -> dict[str, int]:
    """Reason -> samples, most frequent first; beyond `MOST_REASONS` they are counted together as `OTHERS`."""
    counts: Counter[str] = Counter()
    for failure in failures:
        counts[failure.error] += len(failure.ids)
    return _ranked(counts)


def lacking_reasons(reduced: Iterable[GroupReduced]) -> dict[str, int]:
    """Reason -> responses missing from samples that went on with their survivors, as `failure_reasons`."""
    counts: Counter[str] = Counter()
    for group in reduced:
        counts[group.reason] += group.lacking
    return _ranked(counts)


class TellingFailures:
    """Which failures are worth a line of their own: the first of each reason, the tenth, the hundredth, and so on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, failure: SampleFailed) -> tuple[str, int] | None:
        """The reason and the samples that failed for it so far; None: nothing need be said. Beyond `MOST_REASONS` all
        further reasons are counted together.
        """
        known = failure.error in self._counts or len(self._counts) < MOST_REASONS
        reason = failure.error if known else OTHERS
        before = self._counts[reason]
        self._counts[reason] += len(failure.ids)
        is_telling = len(str(self._counts[reason])) > len(str(before)) or before == 0
        return (reason, self._counts[reason]) if is_telling else None


def _ranked(counts: Counter[str]) -> dict[str, int]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = dict(ranked[:MOST_REASONS])
    rest = sum(count for _, count in ranked[MOST_REASONS:])
    return {**shown, OTHERS: rest} if rest else shown
