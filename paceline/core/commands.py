"""Commands and reports of a weight sync, as they cross processes.

Every command carries life, sync id and deadline (unix seconds): a caller's time-out does not stop its callee, so the
*receiver* refuses what comes late (`LateCommand`) or belongs to another life.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.core.manifest import Published, WeightManifest
from paceline.core.sample import Completion, GenerationRequest

ReplicaState = Literal["joining", "ready", "updating", "fenced"]


class CaptureCommand(msgspec.Struct, frozen=True):
    """Take a snapshot of the trainer's weights as this version.

    `base_version` is what the replicas serve: its bytes stay, so that a delta can be made against it. None: there is
    no such version, or none that counts.
    """

    version: int
    sync_id: int
    deadline_wall: float
    base_version: int | None = None


class CaptureReport(msgspec.Struct, frozen=True):
    """A captured snapshot. `wait_seconds` is the wait for a free arena, `seconds` the copy and digest."""

    version: int
    digest: str
    bytes: int
    seconds: float
    wait_seconds: float


class PublishCommand(msgspec.Struct, frozen=True):
    """Encode and publish the captured version, beside the next training step."""

    version: int
    sync_id: int
    deadline_wall: float


class PublishReport(msgspec.Struct, frozen=True):
    """The version can be staged; `seconds` is all of the publication."""

    published: Published
    seconds: float


class StageCommand(msgspec.Struct, frozen=True):
    """Fetch and verify this version beside the one that is served."""

    manifest: WeightManifest
    sync_id: int
    deadline_wall: float


class StageReport(msgspec.Struct, frozen=True):
    """The version is staged; `digest` is what the receiver computed itself, or "" when verification is off.

    `bytes` is what it took from the published version: the delta against `base_version`, or, where that is None, all.
    """

    replica: str
    version: int
    digest: str
    seconds: float
    bytes: int = 0
    base_version: int | None = None


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
    so a lost reply loses no completion. `aborted` requests are not wanted any more: nothing comes back for them.
    """

    requests: list[GenerationRequest]
    acknowledged: int
    wait_seconds: float
    aborted: list[str] = msgspec.field(default_factory=list)


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
    are per replica; `fenced` maps a replica to its error. `mode` is `delta` when every replica took the delta against
    `base_version`; `bytes` is the most that one took, `full_bytes` what a full version has. `changed_share` is the
    share of elements that differ from the base, None where nobody compared.
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
    full_bytes: int = 0
    changed_share: float | None = None
    encode_seconds: float = 0.0


class RolloutStatistics(msgspec.Struct, frozen=True):
    """Samples of a rollouter over all lives: `admitted == failed + taken + outstanding` always holds.

    `failed` ended on the way, `taken` are those that the trainer took (`dropped` of them it dropped). `in_flight` of
    the outstanding ones lack responses. `used` of `allowed` samples count in this version's admission window.
    """

    admitted: int
    failed: int
    dropped: int
    taken: int
    outstanding: int
    in_flight: int
    used: int
    allowed: int


class ValidationResult(msgspec.Struct, frozen=True):
    """What a validation found, as it lies beside the samples in the message queue and in a checkpoint."""

    version: int
    step: int
    accuracy: float
    problems: int


class QueueStatistics(msgspec.Struct, frozen=True):
    """Counters of the message queue since its start; `put == taken + dropped + size` always holds (in samples)."""

    size: int
    capacity: int
    put: int
    taken: int
    dropped: dict[str, int]
    version: int
    closed: bool
