"""Checkpoint engine inside one process: the same versions, digests, leases and refusals, over ordinary memory.

For runs on one event loop (notebooks, simulations): no thread, no socket, no descriptor. Both ends are handed one
`InProcessExchange`, which stands for the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.delta_sending import DeltaEncoder, DeltaMode
from paceline.checkpoint_engine.delta_staging import fitting_delta, prepare_change, read_announced
from paceline.checkpoint_engine.held_weights import HeldWeights, Taken
from paceline.checkpoint_engine.snapshots import Snapshot
from paceline.checkpoint_engine.verification import Verification, VerifyMode
from paceline.core.errors import ConfigError, SyncError, VersionError
from paceline.core.manifest import Captured, Published, WeightManifest
from paceline.core.weight_ports import StagedWeights
from paceline.weights.layout import check_manifest, views_of
from paceline.weights.snapshot import SnapshotWriter

ADDRESS = "in_process"


@dataclass
class InProcessArena:
    """One version's bytes (uint8) and the names of those who hold it, one entry per lease."""

    arena_id: str
    buffer: torch.Tensor
    version: int | None = None
    delta: bytes = b""
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
            raise SyncError(f"there is no arena {manifest.arena_id!r}")
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
        delta: DeltaMode = "full",
    ) -> None:
        if arenas < 2:
            raise ConfigError(f"weights need at least 2 arenas (the newest version and the next), not {arenas}")
        self._exchange = exchange
        self._arenas = arenas
        self._writer = SnapshotWriter(dtype=dtype, keep=keep, nonfinite=nonfinite, threads=1, any_value=any_value)
        self._newest: InProcessArena | None = None
        self._last_version: int | None = None
        self._captured: Snapshot | None = None
        self._base_version: int | None = None
        self._published: dict[str, WeightManifest] = {}  # by arena
        self._encoder = DeltaEncoder(delta, level="fast", threads=1)

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """Copy the tensors; raises what `SharedMemorySender.capture` raises."""
        self._captured = None
        plan, stored = self._writer.prepare(named_tensors)
        if not self._exchange.arenas:
            for index in range(self._arenas):
                arena_id = f"arena-{index}"
                buffer = torch.zeros(plan.total_bytes, dtype=torch.uint8)
                self._exchange.arenas[arena_id] = InProcessArena(arena_id, buffer)
        arena = self._take(version)
        arena.version = None
        self._published.pop(arena.arena_id, None)
        manifest = self._writer.publish(stored, arena.buffer, version=version, arena_id=arena.arena_id, address=ADDRESS)
        self._captured = Snapshot(manifest, arena.buffer)
        self._base_version = base_version
        return self._captured.captured

    def publish(self) -> Published:
        """Let receivers ask for what was captured; raises what `SharedMemorySender.publish` raises."""
        snapshot, self._captured = self._captured, None
        if snapshot is None:
            raise SyncError("there is no captured version to publish")
        attempt = self._encoder.encode(self._base(), snapshot)
        manifest = replace(snapshot.manifest, delta=attempt.record(snapshot.manifest.arena_id))
        self._newest = self._exchange.arenas[manifest.arena_id]
        self._newest.version = self._last_version = manifest.version
        self._newest.delta = b"" if attempt.delta is None else attempt.delta.data
        self._published[manifest.arena_id] = manifest
        return Published(manifest, attempt.seconds, attempt.changed_share)

    def blocking_holders(self) -> Sequence[str]:
        if self._free():
            return []
        others = [arena for arena in self._exchange.arenas.values() if arena is not self._newest]
        return list(dict.fromkeys(name for arena in others for name in arena.holders))

    def close(self) -> None:
        self._exchange.arenas.clear()

    def _base(self) -> Snapshot | None:
        for arena_id, manifest in self._published.items():
            if manifest.version == self._base_version:
                return Snapshot(manifest, self._exchange.arenas[arena_id].buffer)
        return None

    def _take(self, version: int) -> InProcessArena:
        if self._last_version is not None and version <= self._last_version:
            raise VersionError(f"version {version} cannot follow version {self._last_version}")
        free = self._free()
        if not free:
            raise SyncError(f"no free arena for version {version}: held by {', '.join(self.blocking_holders())}")
        return free[0]

    def _free(self) -> list[InProcessArena]:
        """Best first, as `store.weight_store` takes them: the oldest, the newest version last."""
        free = [arena for arena in self._exchange.arenas.values() if not arena.holders]
        return sorted(free, key=lambda arena: (arena is self._newest, -1 if arena.version is None else arena.version))


class InProcessReceiver:
    """Implements `core.ports.WeightReceiver`."""

    def __init__(self, exchange: InProcessExchange, *, holder: str, verify: VerifyMode) -> None:
        self._exchange = exchange
        self._holder = holder
        self._verification = Verification(verify, holder=holder)
        self._staged: list[HeldWeights] = []

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> HeldWeights:
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
        change, taken = None, None
        record = fitting_delta(manifest, base) if apply == "copied" else None
        if record is not None and base is not None:
            change = prepare_change(read_announced(arena.delta, record, manifest), base, threads=1)
            taken = Taken(record.base_version, record.nbytes)
        arena.holders.append(self._holder)
        staged = HeldWeights(
            manifest, tensors, digest, lambda: arena.holders.remove(self._holder), taken=taken, change=change
        )
        self._staged = [other for other in self._staged if other.held] + [staged]
        return staged

    def close(self) -> None:
        """Release everything that is still staged."""
        for staged in self._staged:
            staged.release()
        self._staged = []
