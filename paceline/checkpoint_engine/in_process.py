"""Checkpoint engine inside one process: the same versions, digests, leases and refusals, over ordinary memory.

For runs on one event loop (notebooks, simulations): no thread, no socket, no descriptor. Both ends are handed one
`InProcessExchange`, which stands for the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from paceline.checkpoint_engine.held_weights import HeldWeights
from paceline.checkpoint_engine.verification import Verification, VerifyMode
from paceline.core.errors import ConfigError, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter

ADDRESS = "in_process"


@dataclass
class InProcessArena:
    """One version's bytes (uint8) and the names of those who hold it, one entry per lease."""

    arena_id: str
    buffer: torch.Tensor
    version: int | None = None
    holders: list[str] = field(default_factory=list)


class InProcessExchange:
    """The arenas that a sender and its receivers share."""

    def __init__(self) -> None:
        self.arenas: dict[str, InProcessArena] = {}

    def find(self, manifest: WeightManifest) -> InProcessArena:
        """The arena that holds the manifest's version.

        Raises:
            SyncError: there is none, or it holds another version by now.
        """
        arena = self.arenas.get(manifest.arena_id)
        if arena is None:
            raise SyncError(f"there is no arena {manifest.arena_id}")
        if arena.version != manifest.version:
            raise SyncError(f"version {manifest.version} is gone: its arena holds version {arena.version}")
        return arena


class InProcessSender:
    """Implements `core.ports.WeightSender`; options as in `shared_memory.SharedMemorySender`."""

    def __init__(
        self,
        exchange: InProcessExchange,
        *,
        arenas: int,
        dtype: str | None,
        nonfinite: Literal["error", "skip", "off"],
        keep: tuple[str, ...] = (),
        any_value: tuple[str, ...] = (),
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._exchange = exchange
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=1, any_value=any_value)
        self._newest: InProcessArena | None = None

    def capture(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        """Publish a copy of the tensors; raises what `SharedMemorySender.capture` raises."""
        plan, stored = self._writer.prepare(named_tensors)
        if not self._exchange.arenas:
            for index in range(self._arenas):
                arena_id = f"arena-{index}"
                buffer = torch.zeros(plan.total_bytes, dtype=torch.uint8)
                self._exchange.arenas[arena_id] = InProcessArena(arena_id, buffer)
        arena = self._take(version)
        arena.version = None
        manifest = self._writer.publish(stored, arena.buffer, version=version, arena_id=arena.arena_id, address=ADDRESS)
        arena.version = version
        self._newest = arena
        return manifest

    def blocking_holders(self) -> Sequence[str]:
        spare = self._spare()
        if any(not arena.holders for arena in spare):
            return []
        return list(dict.fromkeys(name for arena in spare for name in arena.holders))

    def close(self) -> None:
        self._exchange.arenas.clear()

    def _take(self, version: int) -> InProcessArena:
        newest = None if self._newest is None else self._newest.version
        if newest is not None and version <= newest:
            raise VersionError(f"version {version} cannot follow version {newest}")
        free = [arena for arena in self._spare() if not arena.holders]
        if not free:
            raise SyncError(f"no free arena for version {version}: held by {', '.join(self.blocking_holders())}")
        return min(free, key=lambda arena: -1 if arena.version is None else arena.version)

    def _spare(self) -> list[InProcessArena]:
        return [arena for arena in self._exchange.arenas.values() if arena is not self._newest]


class InProcessReceiver:
    """Implements `core.ports.WeightReceiver`."""

    def __init__(self, exchange: InProcessExchange, *, holder: str, verify: VerifyMode) -> None:
        self._exchange = exchange
        self._holder = holder
        self._verification = Verification(verify, holder=holder)
        self._staged: list[HeldWeights] = []

    def stage(self, manifest: WeightManifest) -> HeldWeights:
        """Lease and verify; raises what `SharedMemoryReceiver.stage` raises."""
        check_manifest(manifest, manifest.total_bytes)
        arena = self._exchange.find(manifest)
        if manifest.total_bytes > arena.buffer.numel():
            raise SyncError(f"the manifest claims {manifest.total_bytes} bytes, the arena has {arena.buffer.numel()}")
        tensors = views_of(arena.buffer, manifest)
        digest = ""
        if self._verification.mode != "off":
            digest = self._verification.digest(manifest, tensors)
            self._verification.accept(manifest, digest, self._holder)
        arena.holders.append(self._holder)
        staged = HeldWeights(manifest, tensors, digest, lambda: arena.holders.remove(self._holder))
        self._staged = [other for other in self._staged if other.held] + [staged]
        return staged

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in self._staged:
            staged.release()
        self._staged = []
