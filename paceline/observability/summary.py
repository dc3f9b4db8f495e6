"""`summary.json` as a pure fold over the event log: what is not in the log is not in the summary.

Training lasts from the begin of the first `train.step` (its `t` less its `seconds`) to the end of the last. A quantile
is the smallest value that at least that share of the values does not exceed. What cannot be known is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from paceline.core.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GenerationWindow,
    GroupReduced,
    PromptRefused,
    ResponsesAborted,
    RunFinished,
    RunStarted,
    SampleFailed,
    SampleTrained,
    SyncAborted,
    SyncCompleted,
    SyncSkipped,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
    ZombiesRefused,
)
from paceline.core.sample import sample_number
from paceline.core.version import Version
from paceline.observability.failure_reasons import failure_reasons, lacking_reasons
from paceline.observability.ledger import Ledger
from paceline.observability.lives import Life, split_lives, surviving
from paceline.observability.quantiles import quantile
from paceline.observability.reader import Record
from paceline.observability.version_lag import dropped_lengths, measured_lag, predicted_mean_lag

GOOD_ACCURACY = 0.80

E = TypeVar("E", bound=Event)


def fold_summary(records: Iterable[Record]) -> dict[str, Any]:
    """The summary of a run. Lines of several processes may cross; those of one process stand in its order.

    run_id, outcome, exit_code, error      of run.started and run.finished; null while the run is not finished
    lives                                  how often the run was started
    steps                                  optimiser updates of the surviving lineage
    versions                               distinct versions published (sync.completed)
    val_accuracy_first, val_accuracy_last  of the lowest and of the highest validated version
    val_metrics_last                       figures per data source of the highest validated version
    val_accuracy_by_version                "life.n" -> accuracy, lowest version first
    validations_skipped                    validations asked for that have no result
    reward_last                            mean reward of the last update
    startup_seconds                        from the begin of the last command to the begin of its first update
    train_seconds                          length of training, as defined above, summed over the lives
    seconds_to_080                         from the begin of training to the first result of at least 0.80
    syncs                                  count, verified_count, bytes (sum), seconds quantiles of completed syncs;
                                           aborted and skipped ones apart; quantiles of pauses over all
                                           (sync, replica) pairs
    checkpoints                            saved_count, failed_count, bytes of the last, seconds_p50 and seconds_max
    samples                                admitted, trained, dropped by reason, failed, open (neither of these yet)
    failure_reasons                        why samples failed -> how many, most frequent first
    lacking_reasons                        why responses are missing from samples that went on without -> how many
    prompts_refused                        prompts that were too long, or whose rows could not be used
    responses                              aborted_count; zombies_count, zombie_confirmations_count (late, refused)
    dropped_response_lengths               reason -> response length -> responses of samples dropped for it
    lost_lineage                           what earlier lives did after the checkpoint that was gone on from: samples
                                           (which are in `samples.dropped` too) and their ids, updates
    ledger_errors                          samples that ended twice or without beginning, or open after a completed run
    version_lag                            mean, p99, max over trained tokens at consumption; see `version_lag.py`
    tokens_generated                       response tokens of training rollouts; those of validations apart
    trainer_idle_ratio                     share of training in which the trainer waited for samples or for a sync
    rollouter_idle_ratio                   share of the replicas' windows in training in which no decode step ran
    lost_events                            gaps in the `seq` of a process: events that could not be written
    """
    return _summary_of(split_lives(records))


def _summary_of(lives: list[Life]) -> dict[str, Any]:
    ledger = Ledger(lives)
    kept = _in_order(surviving(lives))
    done = _in_order(record for life in lives for record in life.records)
    trainings = [training for life in lives if (training := _training(life)) is not None]
    begin = trainings[0].begin if trainings else None
    steps = _select(kept, TrainStep)
    outcome = _outcome(lives[-1].records)
    return {
        **outcome,
        "lives": len(lives),
        "steps": len(steps),
        "versions": len({sync.version for _, sync in _select(done, SyncCompleted)}),
        **_validations(done, begin),
        "reward_last": steps[-1][1].reward_mean if steps else None,
        "startup_seconds": _startup_seconds(lives[-1]),
        "train_seconds": sum(training.seconds for training in trainings) if trainings else None,
        "syncs": _syncs(done),
        "checkpoints": _checkpoints(done),
        "samples": _samples(ledger),
        "failure_reasons": failure_reasons(failure for _, failure in _select(done, SampleFailed)),
        "lacking_reasons": lacking_reasons(reduced for _, reduced in _select(done, GroupReduced)),
        "prompts_refused": len(_select(done, PromptRefused)),
        "responses": _responses(done),
        "dropped_response_lengths": dropped_lengths(done),
        "lost_lineage": _lost_lineage(lives, ledger),
        "ledger_errors": _ledger_errors(ledger, outcome["outcome"]),
        "version_lag": _version_lag(lives, kept),
        **_tokens(done),
        "trainer_idle_ratio": _trainer_idle_ratio(trainings),
        "rollouter_idle_ratio": _rollouter_idle_ratio(done, trainings),
        "lost_events": sum(_lost_events(life.records) for life in lives),
    }


def encode_summary(summary: Mapping[str, Any]) -> bytes:
    """The bytes of `summary.json`: indented JSON; a number that is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def _select(records: Sequence[Record], kind: type[E]) -> list[tuple[float, E]]:
    return [(record.t, record.event) for record in records if isinstance(record.event, kind)]


class _Training(NamedTuple):
    """Training of one life, in unix seconds; the wait before its first update belongs to its start-up."""

    begin: float
    end: float
    idle_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def _in_order(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.t, record.proc, record.seq))


def _training(life: Life) -> _Training | None:
    steps = _select(_in_order(life.records), TrainStep)
    if not steps:
        return None
    idle = sum(step.wait_seconds + step.blocked_seconds for _, step in steps[1:])
    first_end, first = steps[0]
    return _Training(first_end - first.seconds, steps[-1][0], idle)


def _responses(records: Sequence[Record]) -> dict[str, int]:
    return {
        "aborted_count": sum(len(event.requests) for _, event in _select(records, ResponsesAborted)),
        "zombies_count": sum(event.completions for _, event in _select(records, ZombiesRefused)),
        "zombie_confirmations_count": sum(event.confirmations for _, event in _select(records, ZombiesRefused)),
    }


def _tokens(records: Sequence[Record]) -> dict[str, int]:
    windows = [window for _, window in _select(records, GenerationWindow)]
    return {
        "tokens_generated": sum(window.tokens for window in windows),
        "validation_tokens_generated": sum(window.validation_tokens for window in windows),
    }


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


def _startup_seconds(life: Life) -> float | None:
    started, training = _select(life.records, RunStarted), _training(life)
    return None if training is None or not started else training.begin - started[-1][1].command_wall


def _validations(records: Sequence[Record], begin: float | None) -> dict[str, Any]:
    results = _select(records, ValidationFinished)
    by_version = {result.version: result.accuracy for _, result in results}
    versions = sorted(by_version)
    accuracies = [by_version[version] for version in versions]
    good = [t for t, result in results if result.accuracy >= GOOD_ACCURACY]
    return {
        "val_accuracy_first": accuracies[0] if accuracies else None,
        "val_accuracy_last": accuracies[-1] if accuracies else None,
        "val_metrics_last": max(results, key=lambda result: result[1].version)[1].metrics if results else {},
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
        "skipped_count": len(_select(records, SyncSkipped)),
        "bytes": sum(sync.bytes for sync in completed),
        "full_bytes": sum(sync.full_bytes for sync in completed),
        "delta_count": sum(sync.mode == "delta" for sync in completed),
        "changed_share_p50": quantile([s.changed_share for s in completed if s.changed_share is not None], 0.50),
        "encode_seconds_p50": quantile([s.encode_seconds for s in completed if s.changed_share is not None], 0.50),
        "seconds_p50": quantile(seconds, 0.50),
        "seconds_p99": quantile(seconds, 0.99),
        "pause_seconds_p50": quantile(pauses, 0.50),
        "pause_seconds_p99": quantile(pauses, 0.99),
    }


def _checkpoints(records: Sequence[Record]) -> dict[str, Any]:
    saved = [event for _, event in _select(records, CheckpointSaved)]
    seconds = [event.seconds for event in saved]
    return {
        "saved_count": len(saved),
        "failed_count": len(_select(records, CheckpointFailed)),
        "bytes": saved[-1].bytes if saved else 0,
        "seconds_p50": quantile(seconds, 0.50),
        "seconds_max": max(seconds, default=None),
    }


def _lost_lineage(lives: Sequence[Life], ledger: Ledger) -> dict[str, Any]:
    kept = len(_select(surviving(lives), TrainStep))
    made = sum(len(_select(life.records, TrainStep)) for life in lives)
    return {"samples": len(ledger.lost), "updates": made - kept, "ids": number_ranges(ledger.lost)}


def number_ranges(sample_ids: Sequence[str]) -> list[str]:
    """Sample ids as ranges, each of one life: `["1-4", "1-5", "2-5"]` is `["1-4..5", "2-5"]`."""
    numbers = sorted((int(one.partition("-")[0]), sample_number(one)) for one in sample_ids)
    ranges: list[list[int]] = []
    for life, number in numbers:
        if ranges and ranges[-1][0] == life and ranges[-1][2] == number - 1:
            ranges[-1][2] = number
        else:
            ranges.append([life, number, number])
    return [f"{life}-{first}" if first == last else f"{life}-{first}..{last}" for life, first, last in ranges]


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


def _version_lag(lives: Sequence[Life], kept: Sequence[Record]) -> dict[str, Any]:
    ordered = [replace(life, records=_in_order(life.records)) for life in lives]
    measured = measured_lag(trained for _, trained in _select(kept, SampleTrained))
    return {**measured, "predicted_mean": predicted_mean_lag(ordered)}


def _trainer_idle_ratio(trainings: Sequence[_Training]) -> float | None:
    total = sum(training.seconds for training in trainings)
    return _ratio(sum(training.idle_seconds for training in trainings), total) if total > 0 else None


def _rollouter_idle_ratio(records: Sequence[Record], trainings: Sequence[_Training]) -> float | None:
    windows = [
        window
        for t, window in _select(records, GenerationWindow)
        if any(training.begin < t <= training.end for training in trainings)
    ]
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
