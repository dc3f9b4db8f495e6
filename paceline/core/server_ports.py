"""Seam of a replica whose engine is a server: it takes requests, streams tokens and loads versions by itself.

One loop (`rollout.served_replica`) drives every implementation: a vLLM engine of our own, a vLLM server of somebody
else's, and the fake of the testing kit. All waits inside an implementation have deadlines and raise
`DeadlineExceeded`; a server that is gone raises `WorkerDied`; one that refuses raises `SyncError` with its words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from paceline.core.manifest import WeightManifest
from paceline.core.sample import GenerationRequest


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` of a stream were made by the weights that the server calls `label`."""

    label: str
    start: int
    end: int


class TokenBatch(msgspec.Struct, frozen=True):
    """The next tokens of one stream, with natural-log probabilities of the sampled distribution.

    `finish_reason` is None but for the last batch. There `spans` tell for the whole stream which weights made each
    token. Without them a "closed" stream is believed once the server has said, after its end, what it serves.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    error: str = ""
    spans: list[VersionSpan] | None = None


class HeldVersion(msgspec.Struct, frozen=True):
    """What all workers of a server say of a version that they hold: the digest that they agree with ("" when
    verification is off), and what each took for it: the delta against `base_version`, or, where that is None, all.
    """

    digest: str
    bytes: int
    base_version: int | None = None


class InferenceServer(Protocol):
    """One inference server with one set of weights."""

    @property
    def streams(self) -> Literal["kept", "closed"]:
        """What a pause does to streams: "kept" ones stand still and go on after it, "closed" ones have to be ended
        before it and are continued by new requests. Never changes.
        """
        ...

    async def start(self) -> None:
        """Return once requests and weights would be taken.

        Raises ConfigError: it can never work, with what to do. WorkerDied, DeadlineExceeded: it is not there.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenBatch]:
        """Stream the tokens that follow prompt and response so far. Closing the iterator ends the request."""
        ...

    async def pause(self, deadline_wall: float) -> int:
        """No decode step runs after this returns until `resume`; nothing computed under the old weights will serve a
        new request. Returns how many requests of others were cut by it and will be mixed of two versions.
        """
        ...

    async def resume(self) -> None: ...

    async def stage(self, manifest: WeightManifest, deadline_wall: float) -> HeldVersion:
        """Every worker holds this version, verified, beside generation, once this returns."""
        ...

    async def load(self, version: int) -> None:
        """Every worker loads a version that it holds (packed), within a pause. An error leaves unknown weights."""
        ...

    async def confirm(self, version: int, digest: str) -> None:
        """Every worker says that what entered its model since the last `load` was this; then the version counts.

        Raises DigestMismatch: it was not.
        """
        ...

    async def discard(self, version: int) -> None:
        """Forget a staged version; unknown ones are ignored."""
        ...

    async def weight_version(self) -> int | None:
        """The version (packed) that the server itself says it serves; None: weights that did not come from us."""
        ...

    async def checksums(self) -> dict[str, str]:
        """The server's own checksum of each parameter of each worker."""
        ...

    async def close(self) -> None:
        """Let go of it; a server of our own ends."""
        ...
