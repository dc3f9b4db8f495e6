"""CheckpointEngineManager: moves one version of the weights from the trainer to every replica.

    CAPTURED   the trainer's snapshot is taken; the optimiser is free
    STAGED     every replica holds it, verified, beside what it serves; generation went on
    CONFIRMED  every replica has swapped between two decode steps and proved what it serves

Each step has a deadline and the receiver refuses what comes later. A replica that fails is named; it keeps serving
the old version, whole, or is fenced by itself. No collective: replicas stage and swap independently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import msgspec

from paceline.core.commands import CaptureCommand, CaptureReport, StageCommand, StageReport, SwapCommand, SwapReport
from paceline.core.config import Config
from paceline.core.errors import PacelineError, SyncError
from paceline.core.events import EventSink, SyncCaptured, SyncConfirmed, SyncStaged
from paceline.core.ports import Clock, ReplicaControl, TrainerControl
from paceline.core.version import Version
from paceline.core.waits import Waits

R = TypeVar("R")


class WeightUpdate(msgspec.Struct, frozen=True):
    """What `update_weights` did; seconds per phase, and per replica its proof."""

    version: int
    capture: CaptureReport
    staged: dict[str, StageReport]
    swapped: dict[str, SwapReport]
    phases: dict[str, float]
    verified: bool


class CheckpointEngineManager:
    """Drives the trainer's snapshot and the replicas' stage and swap."""

    def __init__(
        self,
        config: Config,
        trainer: TrainerControl,
        replicas: Sequence[ReplicaControl],
        *,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._trainer = trainer
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._timeout_seconds = config.checkpoint_engine.sync_timeout_seconds
        self._verify = config.checkpoint_engine.verify
        self._clock = clock
        self._events = events
        self._waits = Waits(who="parameter synchronizer", clock=clock, events=events)
        self._next_sync_id = 0

    async def update_weights(self, global_steps: int, *, version: int | None = None) -> WeightUpdate:
        """Capture, stage, swap, confirm. Without `version` the global step is the version, as in the reference.

        Raises:
            SyncError: naming every replica that failed, with its error. DeadlineExceeded: naming who did not answer.
        """
        version = global_steps if version is None else version
        self._next_sync_id += 1
        sync_id = self._next_sync_id
        began = self._clock.now()
        capture = await self._capture(version, sync_id)
        captured = self._clock.now()
        try:
            staged = await self._stage_all(capture, sync_id)
            staged_at = self._clock.now()
            swapped = await self._swap_all(capture, sync_id)
        except PacelineError:
            await self._discard_all(version)
            raise
        phases = {
            "capture": captured - began,
            "stage": staged_at - captured,
            "swap": self._clock.now() - staged_at,
        }
        digest = capture.manifest.digest
        verified = all(staged[name].digest == digest == swapped[name].digest for name in self._replicas)
        return WeightUpdate(
            version=version, capture=capture, staged=staged, swapped=swapped, phases=phases, verified=verified
        )

    async def _capture(self, version: int, sync_id: int) -> CaptureReport:
        command = CaptureCommand(version=version, sync_id=sync_id, deadline_wall=self._deadline())
        report = await self._bounded(self._trainer.capture_weights(command), "the snapshot", "trainer")
        manifest = report.manifest
        self._events.emit(
            SyncCaptured(
                version=version,
                bytes=manifest.total_bytes,
                digest=manifest.digest,
                seconds=report.seconds,
                wait_seconds=report.wait_seconds,
            )
        )
        return report

    async def _stage_all(self, capture: CaptureReport, sync_id: int) -> dict[str, StageReport]:
        command = StageCommand(manifest=capture.manifest, sync_id=sync_id, deadline_wall=self._deadline())

        async def stage(name: str, replica: ReplicaControl) -> StageReport:
            report = await self._bounded(replica.stage(command), "staged weights", name)
            if self._verify == "full" and report.digest != capture.manifest.digest:
                raise SyncError(f"{name} staged {report.digest or 'unverified bytes'}, not {capture.manifest.digest}")
            self._events.emit(
                SyncStaged(
                    replica=name,
                    version=report.version,
                    seconds=report.seconds,
                    verified=report.digest == capture.manifest.digest,
                )
            )
            return report

        return await self._on_every_replica("stage", {n: stage(n, r) for n, r in self._replicas.items()}, capture)

    async def _swap_all(self, capture: CaptureReport, sync_id: int) -> dict[str, SwapReport]:
        command = SwapCommand(version=capture.manifest.version, sync_id=sync_id, deadline_wall=self._deadline())

        async def swap(name: str, replica: ReplicaControl) -> SwapReport:
            report = await self._bounded(replica.swap(command), "the swap", name)
            if report.digest != capture.manifest.digest:
                raise SyncError(f"{name} serves {report.digest}, not {capture.manifest.digest}")
            self._events.emit(
                SyncConfirmed(
                    replica=name, version=report.version, pause_seconds=report.pause_seconds, digest=report.digest
                )
            )
            return report

        return await self._on_every_replica("swap", {n: swap(n, r) for n, r in self._replicas.items()}, capture)

    async def _on_every_replica(
        self, phase: str, calls: Mapping[str, Awaitable[R]], capture: CaptureReport
    ) -> dict[str, R]:
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        failed = {n: r for n, r in zip(calls, results, strict=True) if isinstance(r, BaseException)}
        for error in failed.values():
            if not isinstance(error, PacelineError):
                raise error
        if failed:
            version = Version.unpack(capture.manifest.version)
            causes = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise SyncError(f"{phase} of version {version} failed on {len(failed)} of {len(calls)} replicas: {causes}")
        return {n: r for n, r in zip(calls, results, strict=True) if not isinstance(r, BaseException)}

    async def _discard_all(self, version: int) -> None:
        calls = [
            self._bounded(replica.discard_staged(version), "a discard", name)
            for name, replica in self._replicas.items()
        ]
        await asyncio.gather(*calls, return_exceptions=True)  # a replica that is gone holds nothing

    async def _bounded(self, awaitable: Awaitable[R], what: str, culprit: str) -> R:
        return await self._waits.bounded(awaitable, seconds=self._timeout_seconds, what=what, culprit=culprit)

    def _deadline(self) -> float:
        return self._clock.wall() + self._timeout_seconds
