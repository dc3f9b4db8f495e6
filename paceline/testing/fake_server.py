"""FakeServer: an inference server without a model, for tests of whatever drives an `InferenceServer`.

A token's log-prob tells which weights really made it: minus the number of the version, or `FOREIGN` for weights that
are none of ours and `TORN` for weights that a failed load left. What the server *says* may differ: that is what tests
are about. Faults are switched on by attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

from paceline.core.errors import DigestMismatch, SyncError, WorkerDied
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.sample import GenerationRequest
from paceline.core.server_ports import HeldVersion, TokenBatch, VersionSpan
from paceline.core.version import Version

FOREIGN = -1_000_000.0
TORN = -2_000_000.0
STEP_SECONDS = 0.01


class FakeServer:
    """Implements `core.server_ports.InferenceServer`.

    `streams` is what a pause does to them. `tokens_per_batch` come at a time.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        streams: Literal["kept", "closed"] = "kept",
        tokens_per_batch: int = 1,
    ) -> None:
        self._clock = clock
        self._streams: Literal["kept", "closed"] = streams
        self._tokens_per_batch = tokens_per_batch
        self._running = asyncio.Event()
        self._running.set()
        self._held: dict[int, WeightManifest] = {}
        self._entered: tuple[int, str] | None = None
        self.model: float = FOREIGN
        self.label = "default"
        self.open: set[str] = set()
        self.begun: list[str] = []
        self.failing_loads = 0
        self.silent_failures = 0
        self.mixed_by_next_pause = 0
        self.dead = False
        self.hangs = False
        self.tells_spans = streams == "kept"
        self.ended = False

    @property
    def streams(self) -> Literal["kept", "closed"]:
        """As it was made."""
        return self._streams

    async def start(self) -> None:
        """At once."""
        await self._answer()

    def restart(self) -> None:
        """A server that was started again: its own weights, nothing held, nothing known."""
        self._held.clear()
        self._entered = None
        self.model, self.label = FOREIGN, "default"
        self._running.set()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenBatch]:
        """A token per step; every stop token and limit is the request's own."""
        self.begun.append(request.request_id)
        self.open.add(request.request_id)
        made: list[tuple[str, float]] = []
        sent = 0
        wanted = request.params.max_tokens - len(request.response_ids)
        try:
            while len(made) < wanted:
                await self._running.wait()
                await self._clock.sleep(STEP_SECONDS)
                await self._answer()
                if not self._running.is_set():
                    continue
                made.append((self.label, self.model))
                last = len(made) == wanted
                if last or len(made) - sent >= self._tokens_per_batch:
                    new = [logprob for _, logprob in made[sent:]]
                    sent = len(made)
                    spans = _spans([label for label, _ in made]) if last and self.tells_spans else None
                    yield TokenBatch([7] * len(new), new, "length" if last else None, spans=spans)
        finally:
            self.open.discard(request.request_id)

    async def pause(self, deadline_wall: float) -> int:
        """Between two steps."""
        await self._answer()
        if self._streams == "closed" and self.open:
            raise SyncError(f"a pause with open streams: {sorted(self.open)}")
        self._running.clear()
        mixed, self.mixed_by_next_pause = self.mixed_by_next_pause, 0
        return mixed

    async def resume(self) -> None:
        """Go on."""
        await self._answer()
        self._running.set()

    async def stage(self, manifest: WeightManifest, deadline_wall: float) -> HeldVersion:
        """Takes a step's time."""
        await self._answer()
        await self._clock.sleep(STEP_SECONDS)
        self._held[manifest.version] = manifest
        return HeldVersion(manifest.digest, manifest.total_bytes)

    async def load(self, version: int) -> None:
        """Takes a few steps' time; torn meanwhile."""
        await self._answer()
        if version not in self._held:
            raise SyncError(f"version {Version.unpack(version)} is not held here")
        self._entered, self.model = None, TORN
        await self._clock.sleep(3 * STEP_SECONDS)
        await self._answer()
        if self.failing_loads:
            self.failing_loads -= 1
            raise SyncError("the load failed half-way")
        self.model = -float(Version.unpack(version).n)
        self._entered = (version, self._held[version].digest)
        if self.silent_failures:
            self.silent_failures -= 1
            self._entered, self.model = (version, "other bytes"), TORN
        self.label = str(Version.unpack(version))

    async def confirm(self, version: int, digest: str) -> None:
        """What the last load gave to the model."""
        await self._answer()
        if self._entered != (version, digest):
            raise DigestMismatch("something else entered the model")
        self._held = {held: manifest for held, manifest in self._held.items() if held >= version}

    async def discard(self, version: int) -> None:
        """Forget it."""
        self._held.pop(version, None)

    async def weight_version(self) -> int | None:
        """What the label says."""
        await self._answer()
        return read_label(self.label)

    async def checksums(self) -> dict[str, str]:
        """One, of the weights."""
        return {"weight": str(self.model)}

    async def close(self) -> None:
        """It was let go."""
        self.ended = True

    @property
    def held(self) -> set[int]:
        """Versions that its workers hold."""
        return set(self._held)

    async def _answer(self) -> None:
        if self.dead:
            raise WorkerDied("the server went away", "server")
        while self.hangs:
            await self._clock.sleep(STEP_SECONDS)


def read_label(label: str) -> int | None:
    """`life.n` as a packed version, anything else as None."""
    life, dot, n = label.partition(".")
    return Version(int(life), int(n)).packed if dot else None


def _spans(labels: list[str]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for place, label in enumerate(labels):
        if spans and spans[-1].label == label:
            spans[-1] = VersionSpan(label, spans[-1].start, place + 1)
        else:
            spans.append(VersionSpan(label, place, place + 1))
    return spans
