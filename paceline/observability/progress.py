"""What the live display shows, folded one record at a time.

A pure state: time comes from the records and from the caller's `now`, nothing is read or written. Figures that move are
means over the last `RECENT` updates or windows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod

from paceline.core.events import (
    AdmissionLevel,
    CheckpointFailed,
    Event,
    GenerationWindow,
    ProcessStarted,
    QueueLevel,
    RunFinished,
    RunResumed,
    RunStarted,
    SampleDropped,
    SampleFailed,
    SampleShown,
    SampleTrained,
    SyncAborted,
    SyncCaptured,
    SyncCompleted,
    SyncConfirmed,
    SyncSkipped,
    SyncStaged,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
    ValidationStarted,
    WaitBegan,
    WaitEnded,
)
from paceline.core.version import Version
from paceline.observability.reader import Record

RECENT = 10
HISTORY = 1000
# A replica that has sent no window for so long is not counted in the tokens per second.
WINDOW_SECONDS = 5.0


@dataclass
class ReplicaProgress:
    """One replica as its own events describe it. `version` is packed, None before the first confirmed one."""

    state: str = "starting"
    version: int | None = None
    running: int = 0
    waiting: int = 0
    windows: deque[tuple[float, GenerationWindow]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def tokens_per_second(self, now: float) -> float:
        """Response tokens of training and validation per second over the recent windows."""
        recent = [window for t, window in self.windows if now - t < WINDOW_SECONDS]
        seconds = sum(window.seconds for window in recent)
        return sum(window.tokens + window.validation_tokens for window in recent) / seconds if seconds > 0 else 0.0


@dataclass
class Progress:
    """State of the fold. None means: not known yet."""

    run: RunStarted | None = None
    finished: RunFinished | None = None
    processes: dict[str, ProcessStarted] = field(default_factory=dict)
    replicas: dict[str, ReplicaProgress] = field(default_factory=dict)
    training_began: float | None = None
    now: float = 0.0
    steps: deque[tuple[float, TrainStep]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    lags: deque[dict[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    accuracies: dict[int, float] = field(default_factory=dict)
    validating: ValidationStarted | None = None
    captured: int | None = None
    sync: SyncCompleted | None = None
    syncs: int = 0
    syncs_verified: int = 0
    queue: QueueLevel | None = None
    admission: AdmissionLevel | None = None
    shown: SampleShown | None = None
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    trouble: str = ""

    def feed(self, record: Record) -> None:
        """Take one record."""
        self.now = max(self.now, record.t)
        self._apply(record.event, record.t)

    def feed_all(self, records: Iterable[Record]) -> None:
        """Take records in the order given."""
        for record in records:
            self.feed(record)

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the last update, 0 before the first."""
        return self.steps[-1][1].step if self.steps else 0

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, 0 while it is not known."""
        return self.run.total_steps if self.run else 0

    @property
    def version(self) -> int | None:
        """Packed published version."""
        return self.sync.version if self.sync else None

    @property
    def reward(self) -> float | None:
        """Mean reward of the recent updates."""
        return _mean([step.reward_mean for _, step in self._recent_steps()])

    @property
    def response_length(self) -> float | None:
        """Mean response length of the recent updates, in tokens."""
        return _mean([step.response_length_mean for _, step in self._recent_steps()])

    @property
    def lag_mean(self) -> float | None:
        """Mean version lag of the tokens of the recent updates."""
        tokens = sum(sum(lags.values()) for lags in self.lags)
        return sum(lag * count for lags in self.lags for lag, count in lags.items()) / tokens if tokens else None

    @property
    def lag_max(self) -> int | None:
        """Largest version lag of a token of the recent updates."""
        return max((lag for lags in self.lags for lag in lags), default=None)

    @property
    def trainer_idle_ratio(self) -> float | None:
        """Share of the recent updates' time in which the trainer waited for samples or for a sync."""
        steps = [step for _, step in self._recent_steps()]
        idle = sum(step.wait_seconds + step.blocked_seconds for step in steps)
        total = idle + sum(step.seconds for step in steps)
        return idle / total if total > 0 else None

    @property
    def rollouter_idle_ratio(self) -> float | None:
        """Share of the recent windows in which a replica ran no decode step."""
        windows = [window for replica in self.replicas.values() for _, window in replica.windows]
        total = sum(window.seconds for window in windows)
        return min(1.0, max(0.0, 1 - sum(window.busy_seconds for window in windows) / total)) if total > 0 else None

    @property
    def validation_curve(self) -> list[tuple[int, float]]:
        """(packed version, accuracy), lowest version first."""
        return sorted(self.accuracies.items())

    def tokens_per_second(self, now: float) -> float:
        """Of all replicas together."""
        return sum(replica.tokens_per_second(now) for replica in self.replicas.values())

    def elapsed_seconds(self, now: float) -> float:
        """Since the command began."""
        return max(0.0, now - self.run.command_wall) if self.run else 0.0

    def remaining_seconds(self) -> float | None:
        """Until the last update at the pace of the recent ones; None before the second update and when all is done."""
        if len(self.steps) < 2 or self.finished:
            return None
        (first_t, first), (last_t, last) = self.steps[0], self.steps[-1]
        done = last.step - first.step
        left = self.total_steps - last.step
        return (last_t - first_t) / done * left if done > 0 and left > 0 else None

    def missing_processes(self) -> list[str]:
        """Planned processes that are not ready yet."""
        return [] if self.run is None else [r for r in self.run.threads if r not in self.processes and r != "driver"]

    def _recent_steps(self) -> list[tuple[float, TrainStep]]:
        return list(self.steps)[-RECENT:]

    # ---- the fold ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _apply(self, event: Event, t: float) -> None:
        """Events that the display does not show change nothing."""

    @_apply.register
    def _(self, event: RunStarted, t: float) -> None:
        self.run = event
        for role in event.threads:
            if role.startswith("replica"):
                self.replicas.setdefault(role, ReplicaProgress())

    @_apply.register
    def _(self, event: RunFinished, t: float) -> None:
        self.finished = event
        self.waits.clear()

    @_apply.register
    def _(self, event: RunResumed, t: float) -> None:
        if event.refused:
            self.trouble = f"a checkpoint was refused: {event.refused[0]}"

    @_apply.register
    def _(self, event: CheckpointFailed, t: float) -> None:
        self.trouble = f"no checkpoint of update {event.step}: {event.error}"

    @_apply.register
    def _(self, event: ProcessStarted, t: float) -> None:
        self.processes[event.role] = event
        if event.role in self.replicas and self.replicas[event.role].state == "starting":
            self.replicas[event.role].state = "joining"

    @_apply.register
    def _(self, event: TrainStep, t: float) -> None:
        if self.training_began is None:
            self.training_began = t - event.seconds
        self.steps.append((t, event))
        self.rewards.append(event.reward_mean)

    @_apply.register
    def _(self, event: SampleTrained, t: float) -> None:
        self.lags.append(event.lags)

    @_apply.register
    def _(self, event: SampleDropped, t: float) -> None:
        self.dropped[event.reason] += len(event.ids)

    @_apply.register
    def _(self, event: SampleFailed, t: float) -> None:
        self.failed += len(event.ids)
        self.trouble = f"a sample failed: {event.error}"

    @_apply.register
    def _(self, event: SampleShown, t: float) -> None:
        self.shown = event

    @_apply.register
    def _(self, event: SyncCaptured, t: float) -> None:
        self.captured = event.version

    @_apply.register
    def _(self, event: SyncStaged, t: float) -> None:
        self._replica(event.replica).state = "staged"

    @_apply.register
    def _(self, event: SyncConfirmed, t: float) -> None:
        replica = self._replica(event.replica)
        replica.state, replica.version = "ready", event.version

    @_apply.register
    def _(self, event: SyncCompleted, t: float) -> None:
        self.sync = event
        self.syncs += 1
        self.syncs_verified += event.verified
        for name in event.fenced:
            self._replica(name).state = "fenced"
            self.trouble = f"{name} is fenced since version {Version.unpack(event.version)}"

    @_apply.register
    def _(self, event: SyncAborted, t: float) -> None:
        self.trouble = f"sync of {Version.unpack(event.version)} ended in {event.phase}: {event.error}"

    @_apply.register
    def _(self, event: SyncSkipped, t: float) -> None:
        self.trouble = f"sync of {Version.unpack(event.version)} skipped: {event.error}"

    @_apply.register
    def _(self, event: GenerationWindow, t: float) -> None:
        replica = self._replica(event.replica)
        replica.running, replica.waiting = event.running, event.waiting
        replica.windows.append((t, event))

    @_apply.register
    def _(self, event: QueueLevel, t: float) -> None:
        self.queue = event

    @_apply.register
    def _(self, event: AdmissionLevel, t: float) -> None:
        self.admission = event

    @_apply.register
    def _(self, event: ValidationStarted, t: float) -> None:
        self.validating = event

    @_apply.register
    def _(self, event: ValidationFinished, t: float) -> None:
        self.accuracies[event.version] = event.accuracy
        self._validation_ended(event.version)

    @_apply.register
    def _(self, event: ValidationSkipped, t: float) -> None:
        self.trouble = f"no validation of {Version.unpack(event.version)}: {event.reason}"
        self._validation_ended(event.version)

    @_apply.register
    def _(self, event: WaitBegan, t: float) -> None:
        self.waits[event.who, event.what] = event.since_wall

    @_apply.register
    def _(self, event: WaitEnded, t: float) -> None:
        self.waits.pop((event.who, event.what), None)

    def _replica(self, name: str) -> ReplicaProgress:
        return self.replicas.setdefault(name, ReplicaProgress())

    def _validation_ended(self, version: int) -> None:
        if self.validating and self.validating.version == version:
            self.validating = None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
