"""The schema of the event log: one struct per kind, tagged by `kind`.

Every figure that a person sees (display, summary, plots) is a fold over these. A line of `events.jsonl` is one struct
as JSON with three more fields put first: `t` (unix seconds), `proc` (role of the process), `seq` (rising per
process). Seconds are durations unless named otherwise; versions are packed int64.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all events; carries nothing."""


class RunStarted(Event, frozen=True, tag="run.started"):
    """The driver has checked the configuration and begins to start processes. `command_wall` is when the command
    began.
    """

    run_id: str
    life: int
    seed: int
    cores: int
    threads: dict[str, int]
    command_wall: float
    total_steps: int


class ProcessStarted(Event, frozen=True, tag="process.started"):
    """One process of the run is ready."""

    role: str
    pid: int
    threads: int
    seconds: float


class RunFinished(Event, frozen=True, tag="run.finished"):
    """The last event of a run."""

    outcome: Literal["completed", "interrupted", "failed"]
    error: str
    exit_code: int


class RunResumed(Event, frozen=True, tag="run.resumed"):
    """This life goes on from a checkpoint: of `from_life`, at its update `step` and version `version` (packed).

    The first `admitted` samples of the run belong to the surviving lineage. Those in `restored` were on their way when
    the checkpoint was taken and are again, whatever became of them afterwards. All others had ended by then; whatever
    else an earlier life did after it is lost (`lost_lineage`). `refused` has a line for each newer checkpoint that
    could not be used.
    """

    from_life: int
    step: int
    version: int
    admitted: int
    restored: list[str]
    refused: list[str]


class CheckpointSaved(Event, frozen=True, tag="checkpoint.saved"):
    """A checkpoint of update `step` is whole. The trainer made no update for `seconds`; `version` (packed) is the last
    captured one. `open_samples` were on their way. `pause_seconds` is that of generation: a save asks nothing of the
    replicas.
    """

    step: int
    version: int
    seconds: float
    bytes: int
    open_samples: int
    pause_seconds: float = 0.0


class CheckpointFailed(Event, frozen=True, tag="checkpoint.failed"):
    """A checkpoint could not be written; the one before it is whole and the run goes on."""

    step: int
    error: str


class SampleAdmitted(Event, frozen=True, tag="sample.admitted"):
    """These samples (prompts with their n responses) began; each must end exactly once (L1)."""

    ids: list[str]


class SampleTrained(Event, frozen=True, tag="sample.trained"):
    """These samples were consumed by update `step`. `lags` maps a token's version lag to the number of such tokens."""

    ids: list[str]
    step: int
    version: int
    lags: dict[int, int]


class SampleDropped(Event, frozen=True, tag="sample.dropped"):
    """These samples ended without being trained, for a named reason. `lengths` maps a response length to a count."""

    ids: list[str]
    reason: str
    lengths: dict[int, int] = msgspec.field(default_factory=dict)


class SampleFailed(Event, frozen=True, tag="sample.failed"):
    """This sample could not be made; `error` says why."""

    ids: list[str]
    error: str


class GroupReduced(Event, frozen=True, tag="group.reduced"):
    """This sample goes on with its surviving responses: `lacking` of them could not be made, for this reason."""

    sample_id: str
    lacking: int
    reason: str


class SampleShown(Event, frozen=True, tag="sample.shown"):
    """One response for a person to look at."""

    prompt: str
    response: str
    reward: float
    version: int


class TrainStep(Event, frozen=True, tag="train.step"):
    """One optimiser update. `seconds` is its work; before it the trainer waited `wait_seconds` for samples and was
    held up `blocked_seconds` by a weight sync (its snapshot, a free arena, the sync before).
    """

    step: int
    version: int
    seconds: float
    wait_seconds: float
    reward_mean: float
    response_length_mean: float
    sequences: int
    tokens: int
    metrics: dict[str, float]
    blocked_seconds: float = 0.0


class SyncCaptured(Event, frozen=True, tag="sync.captured"):
    """The snapshot is taken; the optimiser is free from here."""

    version: int
    bytes: int
    digest: str
    seconds: float
    wait_seconds: float


class SyncStaged(Event, frozen=True, tag="sync.staged"):
    """One replica holds the new version beside the one it serves. `verified`: it recomputed the digest and it was
    equal.
    """

    replica: str
    version: int
    seconds: float
    verified: bool


class SyncConfirmed(Event, frozen=True, tag="sync.confirmed"):
    """One replica serves the new version. `pause_seconds`: from its last step under the old to the first possible step
    under the new one."""

    replica: str
    version: int
    pause_seconds: float
    digest: str


class SyncCompleted(Event, frozen=True, tag="sync.completed"):
    """Every READY replica is confirmed or fenced; the version is announced. `bytes` is the most that one replica took;
    the rest is as in `core.commands.SyncReport`.
    """

    version: int
    mode: Literal["full", "delta"]
    bytes: int
    seconds: float
    phases: dict[str, float]
    pauses: dict[str, float]
    fenced: list[str]
    verified: bool
    base_version: int | None = None
    full_bytes: int = 0
    changed_share: float | None = None
    encode_seconds: float = 0.0


class SyncSkipped(Event, frozen=True, tag="sync.skipped"):
    """The trainer's weights were not finite and `checkpoint_engine.nonfinite` is `skip`: nothing was published, and the
    next sync takes this version's number.
    """

    version: int
    error: str


class SyncAborted(Event, frozen=True, tag="sync.aborted"):
    """A sync ended without publication; replicas serve what they served before."""

    version: int
    phase: str
    error: str


class CatchUpFailed(Event, frozen=True, tag="sync.catch_up_failed"):
    """A fenced or new replica could not be brought to the newest version; it stays fenced until the next try."""

    replica: str
    error: str


class ReplicaChanged(Event, frozen=True, tag="replica.changed"):
    """A replica joined, became ready for traffic, was fenced, or was lost, as the rollouter sees it."""

    replica: str
    state: Literal["joining", "ready", "fenced", "lost"]
    reason: str


class GenerationWindow(Event, frozen=True, tag="generation.window"):
    """What one replica did in a window of about one second."""

    replica: str
    version: int
    seconds: float
    busy_seconds: float
    steps: int
    tokens: int
    validation_tokens: int
    running: int
    waiting: int


class QueueLevel(Event, frozen=True, tag="queue.level"):
    """Samples in the message queue."""

    size: int
    capacity: int


class AdmissionLevel(Event, frozen=True, tag="admission.level"):
    """Staleness budget of the rollouter: samples used and allowed in this version's window."""

    used: int
    allowed: int
    in_flight: int


class PromptRefused(Event, frozen=True, tag="prompt.refused"):
    """This prompt is longer than allowed (both in tokens), or its row cannot be used: `reason` says so. It is not sent
    and another one takes its place.
    """

    prompt_id: str
    tokens: int
    allowed: int
    reason: str = ""


class ResponsesAborted(Event, frozen=True, tag="responses.aborted"):
    """These requests were taken from a replica before they were finished, for a named reason. They are issued again,
    unless their sample has ended.
    """

    replica: str
    requests: list[str]
    reason: str


class ForeignRequestsMixed(Event, frozen=True, tag="server.foreign_mixed"):
    """So many requests of others on a replica's server did not end in time before a swap: their answers are of two
    versions.
    """

    replica: str
    requests: int


class ZombiesRefused(Event, frozen=True, tag="zombies.refused"):
    """A replica delivered so many responses, or confirmations of a version, that nobody waits for any more: others have
    been asked for them, or it is not the process that goes by this name now.
    """

    replica: str
    completions: int
    confirmations: int = 0


class ValidationStarted(Event, frozen=True, tag="validation.started"):
    """A validation pinned this version."""

    version: int
    problems: int


class ValidationFinished(Event, frozen=True, tag="validation.finished"):
    """Result of the validation of this version; `step` is the trainer's step that made it. `by_trainer` responses were
    made on the trainer's side; where it failed, `trainer_error` says why and the replicas did its share.
    `accuracy` is the mean over all responses; `metrics` has `val-core/<data_source>/acc/mean@n` and its like.
    """

    version: int
    step: int
    accuracy: float
    problems: int
    seconds: float
    response_length_mean: float
    by_trainer: int = 0
    trainer_error: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class ValidationSkipped(Event, frozen=True, tag="validation.skipped"):
    """A requested validation that did not run or failed; there is one record per requested version."""

    version: int
    reason: str


class WaitBegan(Event, frozen=True, tag="wait.began"):
    """`who` has been waiting for `what` for a while."""

    who: str
    what: str
    since_wall: float


class WaitEnded(Event, frozen=True, tag="wait.ended"):
    """The wait announced by `wait.began` is over."""

    who: str
    what: str
    seconds: float


AnyEvent = (
    RunStarted
    | ProcessStarted
    | RunFinished
    | RunResumed
    | CheckpointSaved
    | CheckpointFailed
    | SampleAdmitted
    | SampleTrained
    | SampleDropped
    | SampleFailed
    | GroupReduced
    | SampleShown
    | TrainStep
    | SyncCaptured
    | SyncStaged
    | SyncConfirmed
    | SyncCompleted
    | SyncAborted
    | SyncSkipped
    | CatchUpFailed
    | ReplicaChanged
    | GenerationWindow
    | QueueLevel
    | AdmissionLevel
    | PromptRefused
    | ResponsesAborted
    | ForeignRequestsMixed
    | ZombiesRefused
    | ValidationStarted
    | ValidationFinished
    | ValidationSkipped
    | WaitBegan
    | WaitEnded
)


class EventSink(Protocol):
    """Where a component puts its events. Never blocks for long, never raises into the loop."""

    def emit(self, event: Event) -> None:
        """Record one event."""
        ...
