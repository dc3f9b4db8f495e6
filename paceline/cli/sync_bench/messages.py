"""What the benchmark and its processes say to each other: msgpack frames, one reply to each request.

The commands and reports of a sync are those of `core.commands`, here in an envelope that says which is which.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    PublishCommand,
    PublishReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)

Engine = Literal["shared_memory", "filesystem", "ray_object"]
Mode = Literal["full", "delta"]
Apply = Literal["mapped", "copied"]
LIFE = 1  # of every version here


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    """The name of the class travels with it."""


# ---- requests -------------------------------------------------------------------------------------------------------


class SetUp(_Tagged, frozen=True):
    """First request to every process. `name` is its role, `directory` where sockets and tables may lie, `in_memory`
    where files of weights may.

    `rank` 0 is the trainer of a peer, 1 to `replicas` are its replicas.
    """

    name: str
    gib: float
    directory: str
    threads: int
    apply: Apply = "mapped"
    engine: Engine = "shared_memory"
    mode: Mode = "full"
    in_memory: str = ""
    peer: str = ""
    rank: int = 0
    replicas: int = 0


class Train(_Tagged, frozen=True):
    """To the trainer: change the weights as an optimiser step does; they stand for `version` from now on."""

    version: int


class Capture(_Tagged, frozen=True):
    """To the trainer: take a snapshot."""

    command: CaptureCommand


class Publish(_Tagged, frozen=True):
    """To the trainer: publish the snapshot."""

    command: PublishCommand


class Memcpy(_Tagged, frozen=True):
    """To the trainer: how fast is a plain copy now."""


class SplitCapture(_Tagged, frozen=True):
    """To the trainer: what copy, digest and guard of a snapshot cost."""


class Stage(_Tagged, frozen=True):
    """To a replica."""

    command: StageCommand


class Swap(_Tagged, frozen=True):
    """To a replica."""

    command: SwapCommand


class Discard(_Tagged, frozen=True):
    """To a replica: forget a staged version."""

    version: int


class Generate(_Tagged, frozen=True):
    """To a replica: begin a sequence that never ends."""


class Pause(_Tagged, frozen=True):
    """To a replica: no decode step until `Resume`."""


class Resume(_Tagged, frozen=True):
    """To a replica."""


class LastPause(_Tagged, frozen=True):
    """To a replica: what the last swap kept its sequence from."""


class TakeDigest(_Tagged, frozen=True):
    """To a replica: how long does it take to hash what is served, with so many threads."""

    threads: int


class TakeProof(_Tagged, frozen=True):
    """To a replica that copies: how much longer does a copy take that proves itself."""


class PeerSync(_Tagged, frozen=True):
    """To a process of a peer: do your part of moving this version."""

    version: int


class PeerCheck(_Tagged, frozen=True):
    """To a replica of a peer: fail unless you hold this version."""

    version: int


class Stop(_Tagged, frozen=True):
    """To every process: release everything and end."""


Request = (
    SetUp
    | Train
    | Capture
    | Publish
    | Memcpy
    | SplitCapture
    | Stage
    | Swap
    | Discard
    | Generate
    | Pause
    | Resume
    | LastPause
    | TakeDigest
    | TakeProof
    | PeerSync
    | PeerCheck
    | Stop
)


# ---- replies --------------------------------------------------------------------------------------------------------


class Done(_Tagged, frozen=True):
    """It is done."""


class Failed(_Tagged, frozen=True):
    """It failed; one line that says why."""

    message: str


class Captured(_Tagged, frozen=True):
    """Reply to `Capture`."""

    report: CaptureReport


class Publication(_Tagged, frozen=True):
    """Reply to `Publish`."""

    report: PublishReport


class Staged(_Tagged, frozen=True):
    """Reply to `Stage`."""

    report: StageReport


class Swapped(_Tagged, frozen=True):
    """Reply to `Swap`."""

    report: SwapReport


class CopyRate(_Tagged, frozen=True):
    """Reply to `Memcpy`: bytes per second, both buffers warm."""

    one_thread: float
    two_threads: float


class CaptureParts(_Tagged, frozen=True):
    """Reply to `SplitCapture`: seconds for the whole model, digest and guard on top of the plain copy."""

    copy_seconds: float
    digest_seconds: float
    guard_seconds: float


class PauseRecord(_Tagged, frozen=True):
    """Reply to `LastPause`, all in seconds.

    `gap` runs from the end of one decode step to the begin of the next with a swap between them; `plain_gap` is the
    median without a swap. `first_step` is the step after the swap, `plain_step` the median of steps, both without the
    rest of the pace; `first_step_faults` are the page faults in it.
    """

    gap: float
    plain_gap: float
    first_step: float
    plain_step: float
    first_step_faults: int


class Seconds(_Tagged, frozen=True):
    """A duration: of the digest or the proof, or for how long a replica of a peer made no token (0: it makes none)."""

    seconds: float


Reply = Done | Failed | Captured | Publication | Staged | Swapped | CopyRate | CaptureParts | PauseRecord | Seconds
