"""TensorBoard scalars from the event log, under the metric names that users of verl's fully_async_policy know.

The x axis is the trainer's step: an event between two updates counts for the one before it. What has no name there
begins with `paceline/`. Uses TensorBoard's own writer, so neither torch nor tensorflow is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from paceline.core.events import (
    AdmissionLevel,
    AnyEvent,
    GenerationWindow,
    QueueLevel,
    SampleDropped,
    SampleTrained,
    SyncCaptured,
    SyncCompleted,
    TrainStep,
    ValidationFinished,
)
from paceline.core.version import Version
from paceline.observability.reader import Record

Scalars = dict[str, float]


class TensorBoardLog:
    """A `Display` that writes to `directory`, which the writer makes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None
        self._step = 0
        self._windows: list[GenerationWindow] = []
        self._dropped: Counter[str] = Counter()

    def start(self) -> None:
        self._writer = EventFileWriter(str(self._directory))

    def feed(self, records: Iterable[Record]) -> None:
        for record in records:
            scalars = self._scalars(record.event)
            if isinstance(record.event, ValidationFinished):
                self._write(scalars, record.event.step, record.t)
            elif scalars:
                self._write(scalars, self._step, record.t)

    def stop(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, event: AnyEvent) -> Scalars:
        match event:
            case TrainStep():
                self._step = event.step
                scalars = {**_of_step(event), **_of_windows(self._windows)}
                self._windows = []
                return scalars
            case GenerationWindow():
                self._windows.append(event)
                return {}
            case SampleDropped():
                self._dropped[event.reason] += len(event.ids)
                return {f"paceline/dropped/{event.reason}": float(self._dropped[event.reason])}
            case _:
                return _of_event(event)

    def _write(self, scalars: Scalars, step: int, t: float) -> None:
        if self._writer is None:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(TensorBoardEvent(wall_time=t, step=step, summary=Summary(value=values)))


def _of_step(event: TrainStep) -> Scalars:
    idle = event.wait_seconds + event.blocked_seconds
    total = event.seconds + idle
    return {
        **event.metrics,
        "critic/rewards/mean": event.reward_mean,
        "response_length/mean": event.response_length_mean,
        "timing_s/step": event.seconds,
        "timing_s/wait_for_enough_samples": event.wait_seconds,
        "fully_async/total_wait_time": event.wait_seconds,
        "fully_async/trainer/idle_ratio": idle / total if total > 0 else 0.0,
        "fully_async/count/current_param_version": float(Version.unpack(event.version).n),
    }


def _of_windows(windows: Iterable[GenerationWindow]) -> Scalars:
    kept = [window for window in windows if window.seconds > 0]
    if not kept:
        return {}
    seconds = sum(window.seconds for window in kept)
    busy = sum(window.busy_seconds for window in kept)
    replicas = len({window.replica for window in kept})
    tokens = sum(window.tokens + window.validation_tokens for window in kept)
    return {
        "fully_async/rollouter/active_time": busy / replicas,
        "fully_async/rollouter/idle_ratio": min(1.0, max(0.0, 1 - busy / seconds)),
        "paceline/tokens_per_second": tokens / seconds * replicas,
    }


def _of_event(event: AnyEvent) -> Scalars:  # noqa: PLR0911 - one return per kind of event
    match event:
        case SyncCompleted():
            return {
                "timing_s/param_sync": event.seconds,
                "checkpoint_engine/payload_mbytes": event.bytes / 1e6,
                "paceline/sync/encode_seconds": event.encode_seconds,
                **({} if event.changed_share is None else {"paceline/sync/changed_share": event.changed_share}),
                "paceline/sync/pause_seconds_max": max(event.pauses.values(), default=0.0),
                **{f"paceline/sync/{phase}_seconds": seconds for phase, seconds in event.phases.items()},
            }
        case SyncCaptured():
            return {"paceline/sync/capture_wait_seconds": event.wait_seconds}
        case QueueLevel():
            return {
                "fully_async/monitor/queue/mq_queue_size": float(event.size),
                "fully_async/static/max_queue_size": float(event.capacity),
            }
        case AdmissionLevel():
            return {
                "fully_async/count/staleness_samples": float(event.used),
                "fully_async/static/max_required_samples": float(event.allowed),
                "fully_async/monitor/active_tasks_size": float(event.in_flight),
            }
        case SampleTrained() if event.lags:
            tokens = sum(event.lags.values())
            mean = sum(lag * count for lag, count in event.lags.items()) / max(1, tokens)
            return {"paceline/version_lag/mean": mean, "paceline/version_lag/max": float(max(event.lags))}
        case ValidationFinished():
            return {
                **event.metrics,
                "val/accuracy": event.accuracy,
                "val/response_length/mean": event.response_length_mean,
                "rollouter/validate_time": event.seconds,
            }
        case _:
            return {}
