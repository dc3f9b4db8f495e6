"""Commands and reports of a weight sync, as they cross processes.

Every command carries life, sync id and deadline (unix seconds): a caller's time-out does not stop its callee, so the
*receiver* refuses what comes late (`LateCommand`) or belongs to another life.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.core.manifest import WeightManifest
from paceline.core.sample import Completion, GenerationRequest

ReplicaState = Literal["joining", "ready", "updating", "fenced"]


class CaptureCommand(msgspec.Struct, frozen=True):
    """Take a snapshot of the trainer's weights as this version."""

    version: int
    sync_id: int
    deadline_wall: float


class CaptureReport(msgspec.Struct, frozen=True):
    """A captured snapshot. `wait_seconds` is the wait for a free arena, `seconds` the copy and digest."""

    manifest: WeightManifest
    seconds: float
    wait_seconds: float


class StageCommand(msgspec.Struct, frozen=True):
    """Fetch and verify this version beside the one that is served."""

    manifest: WeightManifest
    sync_id: int
    deadline_wall: float


class StageReport(msgspec.Struct, frozen=True):
    """The version is staged; `digest` is what the receiver computed itself, or "" when verification is off."""

    replica: str
    version: int
    digest: str
    seconds: float


class SwapCommand(msgspec.Struct, frozen=True):
    """Serve the staged version from the next decode step on."""

    version: int
    sync_id: int
    deadline_wall: float


class SwapReport(msgspec.Struct, frozen=True):
    """Proof of what is served: the digest of the version whose bytes the engine's parameters point at."""

    replica: str
    version: int
    digest: str
    pause_seconds: float


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica as seen from outside; `version` is the confirmed one, None before the first."""

    replica: str
    state: ReplicaState
    version: int | None
    digest: str


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One batch call to a replica: new requests in, finished completions out.

    `acknowledged` is the highest `batch` number the caller has received; the replica keeps what is not acknowledged,
    so a lost reply loses no completion.
    """

    requests: list[GenerationRequest]
    acknowledged: int
    wait_seconds: float


class ExchangeReply(msgspec.Struct, frozen=True, array_like=True):
    """Completions that the caller has not acknowledged. `running` and `waiting` are the replica's load."""

    batch: int
    completions: list[Completion]
    running: int
    waiting: int


class SyncReport(msgspec.Struct, frozen=True):
    """What one sync did; returned by `ParameterSynchronizer.sync_weights`.

    `version` is the captured version, `published` the one that all READY replicas serve after it. `phases` has seconds
    per phase; `publish_lag_seconds` is the time from the end of the snapshot to publication. `confirmed` and `pauses`
    are per replica; `fenced` maps a replica to its error.
    """

    version: int
    published: int
    base_version: int | None
    mode: Literal["full", "delta"]
    bytes: int
    seconds: float
    phases: dict[str, float]
    confirmed: dict[str, int]
    pauses: dict[str, float]
    fenced: dict[str, str]
    verified: bool
    publish_lag_seconds: float


class QueueStatistics(msgspec.Struct, frozen=True):
    """Counters of the message queue since its start; `put == taken + dropped + size` always holds (in samples)."""

    size: int
    capacity: int
    put: int
    taken: int
    dropped: dict[str, int]
    version: int
    closed: bool
