"""Version lag of trained tokens: as measured, and as Little's law predicts it from the samples on their way.

Let S be the samples that one version consumes and O the samples outstanding (admitted and not ended) at the moment
when a version is captured. A sample's lag at consumption is the number of captures between its admission and its
update. Each capture adds 1 to the lag of exactly the samples that are outstanding then, so over a run

    sum of lags of trained samples = sum of O over the captures            (L = lambda * W, with time in versions)
    mean lag = (sum of O over the captures) / (samples trained) = mean O / S

The first capture of a life is none that anything waits across. In a run that its trainer holds up, the window of
`max_required_samples = S * (1 + threshold)` is full after each publication, so O = S * threshold is left of it at the
next capture, and the mean lag is the threshold. It is less where replicas are the slower side.

The prediction takes a sample to be as old as its admission. Tokens that a sample gets after a swap are younger, so the
mean over tokens lies below it by the share of tokens that were still to be made. Samples admitted between a capture and
its publication are the other way round, one version older than their admission; there are few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.events import (
    AnyEvent,
    RunResumed,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    SampleTrained,
    SyncCaptured,
)
from paceline.observability.lives import Life, descent
from paceline.observability.quantiles import weighted_quantile
from paceline.observability.reader import Record


def measured_lag(trained: Iterable[SampleTrained]) -> dict[str, Any]:
    """Mean, p99 and maximum over tokens, in versions; None of nothing."""
    tokens: Counter[float] = Counter()
    for event in trained:
        tokens.update({float(lag): count for lag, count in event.lags.items()})
    total = sum(tokens.values())
    longest = [int(lag) for lag, count in tokens.items() if count]
    p99 = weighted_quantile(tokens, 0.99)
    return {
        "mean": sum(lag * count for lag, count in tokens.items()) / total if total else None,
        "p99": None if p99 is None else int(p99),
        "max": max(longest, default=None),
    }


def predicted_mean_lag(lives: Sequence[Life]) -> float | None:
    """Mean lag of the surviving lineage by Little's law, in versions; None when nothing was trained.

    Records of each life have to be in the order of time.
    """
    outstanding = trained = 0
    for life, cut in descent(lives):
        carried, done = _sums(life, cut)
        outstanding, trained = outstanding + carried, trained + done
    return outstanding / trained if trained else None


def _sums(life: Life, cut: RunResumed | None) -> tuple[int, int]:
    """Samples outstanding, summed over the captures of this life that count, and samples trained in it that count."""
    open_ids = set(life.resumed.restored) if life.resumed is not None else set[str]()
    first: int | None = None
    carried = trained = 0
    for record in life.records:
        event = record.event
        if isinstance(event, SyncCaptured):
            if first is None or event.version <= first:
                first = event.version
            elif cut is None or event.version <= cut.version:
                carried += len(open_ids)
        elif isinstance(event, SampleTrained) and (cut is None or event.step <= cut.step):
            trained += len(event.ids)
        _follow(open_ids, event)
    return carried, trained


def _follow(open_ids: set[str], event: AnyEvent) -> None:
    match event:
        case SampleAdmitted(ids=ids):
            open_ids.update(ids)
        case SampleTrained(ids=ids) | SampleDropped(ids=ids) | SampleFailed(ids=ids):
            open_ids.difference_update(ids)
        case _:
            pass


def dropped_lengths(records: Iterable[Record]) -> dict[str, dict[int, int]]:
    """Reason -> response length in tokens -> number of responses of samples that were dropped for it."""
    found: dict[str, Counter[int]] = {}
    for record in records:
        if isinstance(record.event, SampleDropped) and record.event.lengths:
            found.setdefault(record.event.reason, Counter()).update(record.event.lengths)
    return {reason: dict(sorted(lengths.items())) for reason, lengths in sorted(found.items())}
