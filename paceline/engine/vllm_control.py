"""The weights of one vLLM server as its driver sees them: the same calls whether it is in this process or behind HTTP.

    stage     Stage, then ask until every worker says that it is staged
    load      start, update (the plug-in loads and hashes), finish with the version's label
    confirm   every worker says what entered its model; vLLM says which label it serves

Law: the label is set only when every worker has loaded, and a version counts only when both agree.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from msgspec.structs import replace

from paceline.core.errors import ConfigError, DeadlineExceeded, DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.server_ports import HeldVersion
from paceline.core.version import Version
from paceline.engine.vllm_commands import (
    STILL_STAGING,
    Confirm,
    Discard,
    Hello,
    Load,
    ReceiverSpec,
    Stage,
    Staged,
    Took,
    Wrote,
    host_id,
    pack_command,
    version_label,
    version_of_label,
)

T = TypeVar("T")

UNKNOWN = "unknown"  # the label of a server whose workers may hold different weights
HINT_SECONDS = 0.005
FIRST_LOOK_SECONDS = 0.5
LAST_LOOK_SECONDS = 8.0


class VllmCalls(Protocol):
    """vLLM's calls around its weights. They raise PacelineErrors alone: those of the plug-in as themselves."""

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None: ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, info: Mapping[str, Any]) -> None: ...

    async def finish_weight_update(self, label: str) -> None: ...

    async def weight_label(self) -> str: ...


class VllmWeights:
    """Drives one server. `extent` is what a load after the first takes: all, or the layers that changed."""

    def __init__(
        self,
        calls: VllmCalls,
        *,
        name: str,
        receiver: ReceiverSpec,
        clock: Clock,
        extent: Literal["full", "changed"] = "changed",
        name_rules: tuple[tuple[str, str], ...] = (),
        trainer_only: tuple[str, ...] = (),
    ) -> None:
        self._calls = calls
        self._name = name
        self._receiver = receiver
        self._clock = clock
        self._extent = extent
        self._name_rules = name_rules
        self._trainer_only = trainer_only

    async def greet(self, hello: Hello) -> None:
        """Make sure that every worker has the plug-in, of this protocol, a model that fits, and a way to the weights.

        Raises:
            ConfigError: it does not fit, or it is on another host than the shared memory.
        """
        host = host_id() if self._receiver.backend == "shared_memory" else ""
        await self._calls.init_weight_transfer(pack_command(replace(hello, host=host)))

    async def stage(self, manifest: WeightManifest, deadline_wall: float) -> HeldVersion:
        """See `InferenceServer.stage`."""
        with tempfile.TemporaryDirectory(prefix="paceline-hints-") as hints:
            told = hints if self._receiver.backend == "shared_memory" else ""  # the workers are on this host
            command = Stage(manifest, self._receiver, self._name_rules, self._trainer_only, told)
            await self._calls.init_weight_transfer(pack_command(command))
            await self._until_staged(manifest, Path(hints) / str(manifest.version), deadline_wall)
        digest = "" if self._receiver.verify == "off" else manifest.digest
        delta = manifest.delta
        takes_deltas = self._receiver.backend == "filesystem"  # shared memory is mapped whole
        if takes_deltas and delta is not None and await self._says_yes(Took(manifest.version, delta.base_version)):
            return HeldVersion(digest, delta.nbytes, delta.base_version)
        return HeldVersion(digest, manifest.total_bytes)

    async def _until_staged(self, manifest: WeightManifest, hint: Path, deadline_wall: float) -> None:
        """Ask when there is a hint that the answer would be yes, and now and then without."""
        pause = FIRST_LOOK_SECONDS
        await self._hinted(hint, pause)
        while not await self._is_staged(manifest.version):
            if self._clock.wall() + pause > deadline_wall:
                line = f"{self._name} has not staged {Version.unpack(manifest.version)} in time"
                raise DeadlineExceeded(line, self._name, pause)
            if hint.exists():  # one of several workers is there
                await self._clock.sleep(pause)
            else:
                await self._hinted(hint, pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)

    async def _hinted(self, hint: Path, seconds: float) -> None:
        ends = self._clock.now() + seconds
        while not hint.exists() and self._clock.now() < ends:
            await self._clock.sleep(HINT_SECONDS)

    async def load(self, version: int) -> None:
        """See `InferenceServer.load`."""
        try:
            await self._calls.start_weight_update()
            await self._calls.update_weights(pack_command(Load(version, self._extent)))
            await self._calls.finish_weight_update(version_label(version))
        except (SyncError, ConfigError):
            # Of several workers some may have loaded: they wait for the end of the update, and would refuse another.
            with suppress(SyncError):
                await self._calls.finish_weight_update(UNKNOWN)
            raise

    async def confirm(self, version: int, digest: str) -> None:
        """See `InferenceServer.confirm`."""
        await self._calls.init_weight_transfer(pack_command(Confirm(version, digest)))
        served = await self.weight_version()
        if served != version:
            said = "weights of its own" if served is None else str(Version.unpack(served))
            raise DigestMismatch(f"{self._name} says it serves {said}, not {Version.unpack(version)}")

    async def discard(self, version: int) -> None:
        """See `InferenceServer.discard`."""
        await self._calls.init_weight_transfer(pack_command(Discard(version)))

    async def weight_version(self) -> int | None:
        """See `InferenceServer.weight_version`."""
        return version_of_label(await self._calls.weight_label())

    async def wrote_in_place(self, version: int) -> bool:
        """Whether every worker has brought in the version (packed) that it has loaded last by writing what differs."""
        return await self._says_yes(Wrote(version))

    async def _says_yes(self, question: Took | Wrote) -> bool:
        try:
            await self._calls.init_weight_transfer(pack_command(question))
        except SyncError:
            return False
        return True

    async def _is_staged(self, version: int) -> bool:
        try:
            await self._calls.init_weight_transfer(pack_command(Staged(version)))
        except SyncError as error:
            if STILL_STAGING not in error.message:
                raise
            return False
        return True


async def within(call: Awaitable[T], seconds: float, *, who: str, what: str) -> T:
    """The result of `call`.

    Raises:
        DeadlineExceeded: it did not come in time.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(f"{who} did not answer within {seconds:g} s: {what}", who, seconds) from error
