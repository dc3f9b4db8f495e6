"""`summary.json` as a pure fold over the event log: what is not in the log is not in the summary.

Training lasts from the begin of the first `train.step` (its `t` less its `seconds`) to the end of the last. A quantile
is the smallest value that at least that share of the values does not exceed. What cannot be known is null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from paceline.core.events import (
    Event,
    GenerationWindow,
    RunFinished,
    RunStarted,
    SampleTrained,
    SyncAborted,
    SyncCompleted,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
)
from paceline.core.version import Version
from paceline.observability.ledger import Ledger
from paceline.observability.reader import Record

GOOD_ACCURACY = 0.80

E = TypeVar("E", bound=Event)


def fold_summary(records: Iterable[Record]) -> dict[str, Any]:
    """The summary of a run. Lines of several processes may cross; those of one process stand in its order.

    run_id, outcome, exit_code, error      of run.started and run.finished; null while the run is not finished
    steps                                  optimiser updates
    versions                               distinct versions published (sync.completed)
    val_accuracy_first, val_accuracy_last  of the lowest and of the highest validated version
    val_accuracy_by_version                "life.n" -> accuracy, lowest version first
    validations_skipped                    validations asked for that have no result
    reward_last                            mean reward of the last update
    startup_seconds                        from the begin of the command to the begin of the first update
    train_seconds                          length of training, as defined above
    seconds_to_080                         from the begin of training to the first result of at least 0.80
    syncs                                  count, verified_count, bytes (sum), seconds quantiles of completed syncs;
                                           aborted ones apart; quantiles of pauses over all (sync, replica) pairs
    samples                                admitted, trained, dropped by reason, failed, open (neither of these yet)
    ledger_errors                          samples that ended twice or without beginning, or open after a completed run
    version_lag                            mean, p99, max over trained tokens, in versions, at consumption
    tokens_generated                       response tokens of training rollouts; those of validations apart
    trainer_idle_ratio                     share of training in which the trainer waited for samples or for a sync
    rollouter_idle_ratio                   share of the replicas' windows in training in which no decode step ran
    lost_events                            gaps in the `seq` of a process: events that could not be written
    """
    in_file = list(records)
    ordered = sorted(in_file, key=lambda record: (record.t, record.proc, record.seq))
    ledger = Ledger()
    for record in ordered:
        ledger.feed(record.event)
    steps = _select(ordered, TrainStep)
    begin, end = _training(steps)
    outcome = _outcome(ordered)
    windows = [window for _, window in _select(ordered, GenerationWindow)]
    return {
        **outcome,
        "steps": len(steps),
        "versions": len({sync.version for _, sync in _select(ordered, SyncCompleted)}),
        **_validations(ordered, begin),
        "reward_last": steps[-1][1].reward_mean if steps else None,
        "startup_seconds": _startup_seconds(ordered, begin),
        "train_seconds": None if begin is None or end is None else end - begin,
        "syncs": _syncs(ordered),
        "samples": _samples(ledger),
        "ledger_errors": _ledger_errors(ledger, outcome["outcome"]),
        "version_lag": _version_lag(ordered),
        "tokens_generated": sum(window.tokens for window in windows),
        "validation_tokens_generated": sum(window.validation_tokens for window in windows),
        "trainer_idle_ratio": _trainer_idle_ratio(steps, begin, end),
        "rollouter_idle_ratio": _rollouter_idle_ratio(ordered, begin, end),
        "lost_events": _lost_events(in_file),
    }


def encode_summary(summary: Mapping[str, Any]) -> bytes:
    """The bytes of `summary.json`: indented JSON; a number that is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def quantile(values: Iterable[float], share: float) -> float | None:
    """Smallest of `values` that at least `share` of them do not exceed; None of nothing.

    Example: the 0.99 quantile of 50 values is their maximum.
    """
    return _weighted_quantile(Counter(values), share)


def _weighted_quantile(counts: Mapping[float, int], share: float) -> float | None:
    rest = math.ceil(share * sum(counts.values()))
    for value in sorted(counts):
        rest -= counts[value]
        if rest <= 0:
            return value
    return None


def _select(records: Sequence[Record], kind: type[E]) -> list[tuple[float, E]]:
    return [(record.t, record.event) for record in records if isinstance(record.event, kind)]


def _training(steps: Sequence[tuple[float, TrainStep]]) -> tuple[float | None, float | None]:
    if not steps:
        return None, None
    first_end, first = steps[0]
    return first_end - first.seconds, steps[-1][0]


def _outcome(records: Sequence[Record]) -> dict[str, Any]:
    started = [event for _, event in _select(records, RunStarted)]
    finished = [event for _, event in _select(records, RunFinished)]
    last = finished[-1] if finished else None
    return {
        "run_id": started[-1].run_id if started else None,
        "outcome": last.outcome if last else None,
        "exit_code": last.exit_code if last else None,
        "error": last.error if last else None,
    }


def _startup_seconds(records: Sequence[Record], begin: float | None) -> float | None:
    started = _select(records, RunStarted)
    return None if begin is None or not started else begin - started[-1][1].command_wall


def _validations(records: Sequence[Record], begin: float | None) -> dict[str, Any]:
    results = _select(records, ValidationFinished)
    by_version = {result.version: result.accuracy for _, result in results}
    versions = sorted(by_version)
    accuracies = [by_version[version] for version in versions]
    good = [t for t, result in results if result.accuracy >= GOOD_ACCURACY]
    return {
        "val_accuracy_first": accuracies[0] if accuracies else None,
        "val_accuracy_last": accuracies[-1] if accuracies else None,
        "val_accuracy_by_version": {str(Version.unpack(version)): by_version[version] for version in versions},
        "validations_skipped": len(_select(records, ValidationSkipped)),
        "seconds_to_080": max(0.0, good[0] - begin) if good and begin is not None else None,
    }


def _syncs(records: Sequence[Record]) -> dict[str, Any]:
    completed = [sync for _, sync in _select(records, SyncCompleted)]
    seconds = [sync.seconds for sync in completed]
    pauses = [pause for sync in completed for pause in sync.pauses.values()]
    return {
        "count": len(completed),
        "verified_count": sum(sync.verified for sync in completed),
        "aborted_count": len(_select(records, SyncAborted)),
        "bytes": sum(sync.bytes for sync in completed),
        "seconds_p50": quantile(seconds, 0.50),
        "seconds_p99": quantile(seconds, 0.99),
        "pause_seconds_p50": quantile(pauses, 0.50),
        "pause_seconds_p99": quantile(pauses, 0.99),
    }


def _samples(ledger: Ledger) -> dict[str, Any]:
    return {
        "admitted": ledger.admitted,
        "trained": ledger.trained,
        "dropped": dict(sorted(ledger.dropped.items())),
        "failed": ledger.failed,
        "open": ledger.open,
    }


def _ledger_errors(ledger: Ledger, outcome: str | None) -> list[str]:
    errors = ledger.errors()
    if outcome == "completed" and ledger.open:
        errors.append(f"{ledger.open} samples are open although the run is completed")
    return errors


def _version_lag(records: Sequence[Record]) -> dict[str, Any]:
    tokens: Counter[float] = Counter()
    for _, trained in _select(records, SampleTrained):
        tokens.update({float(lag): count for lag, count in trained.lags.items()})
    total = sum(tokens.values())
    longest = [int(lag) for lag, count in tokens.items() if count]
    p99 = _weighted_quantile(tokens, 0.99) if total else None
    return {
        "mean": sum(lag * count for lag, count in tokens.items()) / total if total else None,
        "p99": None if p99 is None else int(p99),
        "max": max(longest, default=None),
    }


def _trainer_idle_ratio(
    steps: Sequence[tuple[float, TrainStep]], begin: float | None, end: float | None
) -> float | None:
    # The wait before the first update belongs to the start-up, not to training.
    if begin is None or end is None or end <= begin:
        return None
    return _ratio(sum(step.wait_seconds + step.blocked_seconds for _, step in steps[1:]), end - begin)


def _rollouter_idle_ratio(records: Sequence[Record], begin: float | None, end: float | None) -> float | None:
    if begin is None or end is None:
        return None
    windows = [window for t, window in _select(records, GenerationWindow) if begin < t <= end]
    total = sum(window.seconds for window in windows)
    return _ratio(total - sum(window.busy_seconds for window in windows), total) if total > 0 else None


def _ratio(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _lost_events(records: Sequence[Record]) -> int:
    lost = 0
    last: dict[str, int] = {}
    for record in records:
        gap = record.seq - last.get(record.proc, -1) - 1
        # A lower number than before is a new process of the same role, not a gap.
        lost += max(0, gap)
        last[record.proc] = record.seq
    return lost
