"""Progress as plain lines, for a log file or a pipe: `tag key=value ...`, ASCII, no escape codes.

Keys are stable; a value with a space or a quote stands in JSON quotes. Tags: run, process, step, validation,
sync_error, sync_skipped, sample_error (the first of each reason, the 10th, the 100th ...; `samples` counts them),
resumed, checkpoint, checkpoint_error, wait, wait_over, finished.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from paceline.core.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointSaved,
    ProcessStarted,
    RunResumed,
    RunStarted,
    SampleFailed,
    SyncAborted,
    SyncCompleted,
    SyncSkipped,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
    WaitBegan,
    WaitEnded,
)
from paceline.core.version import Version
from paceline.observability.failure_reasons import TellingFailures
from paceline.observability.progress import Progress
from paceline.observability.reader import Record
from paceline.observability.summary_table import summary_table

STEPS_BETWEEN_LINES = 10
TABLE_WIDTH = 110

Fields = dict[str, Any]


class PlainLines:
    """A `Display` that writes to `stream`: a line for every `steps_between` updates and one for each thing of note."""

    def __init__(self, stream: TextIO, run_dir: Path, steps_between: int = STEPS_BETWEEN_LINES) -> None:
        self._stream = stream
        self._run_dir = run_dir
        self._steps_between = steps_between
        self._progress = Progress()
        self._failures = TellingFailures()

    def start(self) -> None:
        self._write("run", {"directory": str(self._run_dir)})

    def feed(self, records: Iterable[Record]) -> None:
        for record in records:
            self._progress.feed(record)
            tag, fields = self._line(record)
            if tag:
                self._write(tag, fields)

    def stop(self, summary: Mapping[str, Any]) -> None:
        if not summary:
            return
        self._write("finished", _flat(summary))
        table = io.StringIO()
        console = Console(file=table, width=TABLE_WIDTH, color_system=None, force_terminal=False)
        console.print(summary_table(summary, str(self._run_dir)))
        for line in table.getvalue().splitlines():
            self._stream.write(line.rstrip().encode("ascii", "backslashreplace").decode("ascii") + "\n")
        self._stream.flush()

    def _line(self, record: Record) -> tuple[str, Fields]:
        match record.event:
            case TrainStep(step=step):
                due = step == 1 or step % self._steps_between == 0 or step == self._progress.total_steps
                return ("step", self._step_fields()) if due else ("", {})
            case SyncCompleted(fenced=fenced, version=version) if fenced:
                return "sync_error", {"version": Version.unpack(version), "fenced": ",".join(fenced)}
            case SampleFailed() as failure:
                told = self._failures.count(failure)
                return ("sample_error", {"samples": told[1], "error": told[0]}) if told else ("", {})
            case event:
                return _line_of(event)

    def _step_fields(self) -> Fields:
        progress = self._progress
        fields: Fields = {
            "step": f"{progress.step}/{progress.total_steps}",
            "version": _version(progress.version),
            "reward": _number(progress.reward),
            "val_accuracy": _number(progress.validation_curve[-1][1]) if progress.accuracies else "none",
            "response_length": _number(progress.response_length),
            "tokens_per_second": round(progress.tokens_per_second(progress.now)),
            "lag_mean": _number(progress.lag_mean),
            "lag_max": "none" if progress.lag_max is None else progress.lag_max,
            "trainer_idle": _number(progress.trainer_idle_ratio),
            "rollouter_idle": _number(progress.rollouter_idle_ratio),
        }
        if progress.queue:
            fields["queue"] = f"{progress.queue.size}/{progress.queue.capacity}"
        if progress.admission:
            fields["admission"] = f"{progress.admission.used}/{progress.admission.allowed}"
        if progress.sync:
            fields["sync_mode"] = progress.sync.mode
            fields["sync_bytes"] = progress.sync.bytes
            if progress.sync.changed_share is not None:
                fields["sync_full_bytes"] = progress.sync.full_bytes
                fields["sync_changed"] = f"{progress.sync.changed_share:.6f}"
                fields["encode_seconds"] = _number(progress.sync.encode_seconds)
            fields["sync_seconds"] = _number(progress.sync.seconds)
            fields["pause_seconds"] = f"{max(progress.sync.pauses.values(), default=0.0):.6f}"
        fields["elapsed"] = round(progress.elapsed_seconds(progress.now))
        return fields

    def _write(self, tag: str, fields: Mapping[str, Any]) -> None:
        words = [tag, *(f"{key}={_word(value)}" for key, value in fields.items())]
        self._stream.write(" ".join(words) + "\n")
        self._stream.flush()


def _line_of(event: AnyEvent) -> tuple[str, Fields]:  # noqa: PLR0911 - one return per kind of line
    match event:
        case RunStarted():
            threads = sum(event.threads.values())
            fields: Fields = {"id": event.run_id, "life": event.life, "seed": event.seed, "cores": event.cores}
            return "run", {**fields, "threads": threads, "total_steps": event.total_steps}
        case ProcessStarted():
            fields = {"role": event.role, "pid": event.pid, "threads": event.threads}
            return "process", {**fields, "seconds": _number(event.seconds)}
        case ValidationFinished():
            fields = {"version": _version(event.version), "step": event.step, "accuracy": _number(event.accuracy)}
            return "validation", {**fields, "problems": event.problems, "seconds": _number(event.seconds)}
        case ValidationSkipped():
            return "validation", {"version": _version(event.version), "skipped": event.reason}
        case SyncAborted():
            return "sync_error", {"version": _version(event.version), "phase": event.phase, "error": event.error}
        case SyncSkipped():
            return "sync_skipped", {"version": _version(event.version), "error": event.error}
        case WaitBegan():
            return "wait", {"who": event.who, "what": event.what, "since": f"{event.since_wall:.1f}"}
        case WaitEnded():
            return "wait_over", {"who": event.who, "what": event.what, "seconds": _number(event.seconds)}
        case _:
            return _checkpoint_line(event)


def _checkpoint_line(event: AnyEvent) -> tuple[str, Fields]:
    match event:
        case RunResumed():
            fields: Fields = {"from_life": event.from_life, "step": event.step, "version": _version(event.version)}
            refused = {"refused": "; ".join(event.refused)} if event.refused else {}
            return "resumed", {**fields, "samples_on_their_way": len(event.restored), **refused}
        case CheckpointSaved():
            fields = {"step": event.step, "seconds": _number(event.seconds), "bytes": event.bytes}
            return "checkpoint", {**fields, "version": _version(event.version)}
        case CheckpointFailed():
            return "checkpoint_error", {"step": event.step, "error": event.error}
        case _:
            return "", {}


def _version(packed: int | None) -> str:
    return "none" if packed is None else str(Version.unpack(packed))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _word(value: object) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & {" ", '"', "="}
    return text if plain else json.dumps(text)


def _flat(summary: Mapping[str, Any], prefix: str = "") -> Fields:
    flat: Fields = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, float):
            flat[prefix + name] = f"{value:.6g}"
        elif isinstance(value, list):
            flat[prefix + name] = len(value)
        else:
            flat[prefix + name] = "none" if value is None else value
    return flat
