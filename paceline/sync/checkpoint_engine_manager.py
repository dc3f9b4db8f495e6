"""CheckpointEngineManager: moves one version of the weights from the trainer to every replica.

    CAPTURED   the trainer's snapshot is taken; the optimiser is free
    PUBLISHED  it is encoded and can be asked for; the trainer's next step went on
    STAGED     every replica holds it, verified, beside what it serves; generation went on
    CONFIRMED  every replica has swapped between two decode steps and proved what it serves

Each step has a deadline and the receiver refuses what comes later. No collective: replicas stage and swap
independently. One that fails is FENCED with its error while the others go on; it keeps serving what it served, whole,
but counts for nothing until it has confirmed a full snapshot again (`catch_up`, beside everything else). A delta is
made against the newest version that a replica has confirmed; one that serves another takes the full version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

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
from paceline.core.config import Config
from paceline.core.errors import DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.core.events import EventSink, SyncCaptured, SyncConfirmed, SyncStaged, ZombiesRefused
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock, ReplicaControl, TrainerControl
from paceline.core.version import Version
from paceline.core.waits import Waits

R = TypeVar("R")

MOST_PATIENCE_SECONDS = 0.4  # beyond a command's deadline, so that an error at the deadline comes with its own name


class WeightUpdate(msgspec.Struct, frozen=True):
    """What `update_weights` did; seconds per phase, and per replica its proof or why it is fenced."""

    version: int
    manifest: WeightManifest
    publication: PublishReport
    staged: dict[str, StageReport]
    swapped: dict[str, SwapReport]
    fenced: dict[str, str]
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
        self._fenced: dict[str, str] = {}
        self._dead: set[str] = set()
        self._joined = asyncio.Event()
        self._newest: WeightManifest | None = None
        self._joining: set[str] = set()  # fenced, but on their feet: the next version takes them along
        self._settled = asyncio.Event()  # no version is on its way
        self._settled.set()
        self._timeout_seconds = config.checkpoint_engine.sync_timeout_seconds
        self._verify = config.checkpoint_engine.verify
        self._at_once = asyncio.Semaphore(config.checkpoint_engine.swaps_at_once or 1_000_000)
        self._clock = clock
        self._events = events
        self._waits = Waits(who="parameter synchronizer", clock=clock, events=events)
        self._next_sync_id = 0

    # -- membership ----------------------------------------------------------------------------------------------------

    def add_replicas(self, replicas: Iterable[ReplicaControl]) -> None:
        """Replicas join, or return under their old name; each counts once it has caught up (`catch_up`)."""
        for replica in replicas:
            self._replicas[replica.replica_id] = replica
            self._dead.discard(replica.replica_id)
            self._joined.set()
            self._fenced[replica.replica_id] = "has not confirmed a version yet"

    def remove_replicas(self, replica_ids: Iterable[str]) -> None:
        """Replicas leave; unknown names are ignored."""
        for replica_id in replica_ids:
            self._replicas.pop(replica_id, None)
            self._fenced.pop(replica_id, None)
            self._dead.discard(replica_id)

    @property
    def has_members(self) -> bool:
        """Whether there is a replica that is not known to be dead."""
        return bool(self._replicas.keys() - self._dead)

    async def somebody_joins(self) -> None:
        """Return once a replica has been added."""
        self._joined.clear()
        await self._joined.wait()

    @property
    def fenced(self) -> dict[str, str]:
        """Replicas that have to catch up, with the reason."""
        return dict(self._fenced)

    async def catch_up(self, replica_id: str) -> int:
        """Bring one fenced replica to the newest version by a full snapshot; returns the version it confirmed.

        Raises:
            PacelineError: it stays fenced.
        """
        try:
            while True:
                version = await self._try_to_catch_up(replica_id)
                if version is not None:
                    return version
        finally:
            self._joining.discard(replica_id)

    async def _try_to_catch_up(self, replica_id: str) -> int | None:
        """The version that the replica confirmed, or None when a newer one took its place meanwhile."""
        await self._settled.wait()
        manifest, replica = self._newest, self._replicas.get(replica_id)
        if manifest is None or replica is None:
            raise SyncError(f"{replica_id} cannot catch up: there is no version yet, or it has left")
        try:
            if not await self._serves(replica_id, replica, manifest):
                await self._stage(replica_id, replica, replace(manifest, delta=None))
                await self._swap(replica_id, replica, manifest)
        except PacelineError as error:
            if isinstance(error, WorkerDied | DeadlineExceeded):
                raise
            if self._newest is manifest and self._settled.is_set():
                raise
            return None
        if self._newest is not manifest or not self._settled.is_set():
            self._joining.add(replica_id)
            return None
        if self._replicas.get(replica_id) is not replica:
            return None
        self._count_in(replica_id)
        return manifest.version

    # -- one version ---------------------------------------------------------------------------------------------------

    async def update_weights(self, global_steps: int, *, version: int | None = None) -> WeightUpdate:
        """Capture, publish, stage, swap, confirm. Without `version` the global step is the version.

        Raises:
            SyncError: no replica confirmed; every one is named with its error. DeadlineExceeded, WorkerDied and
                others: the trainer gave no snapshot.
        """
        version = global_steps if version is None else version
        self._settled.clear()
        try:
            return await self._update(version)
        finally:
            self._settled.set()

    async def _update(self, version: int) -> WeightUpdate:
        times = [self._clock.now()]
        await self._capture(version)
        times.append(self._clock.now())
        publication = await self._publish(version)
        manifest = publication.published.manifest
        times.append(self._clock.now())
        failed: dict[str, str] = {}
        members = self._members()
        staged = await self._on_each(members, self._stage, manifest, failed)
        times.append(self._clock.now())
        swapped = await self._on_each({name: members[name] for name in staged}, self._swap, manifest, failed)
        times.append(self._clock.now())
        phases = {name: times[i + 1] - times[i] for i, name in enumerate(("capture", "encode", "stage", "swap"))}
        await self._discard({name: members[name] for name in failed}, version)
        # A replica that left or was started again meanwhile is not the one that confirmed or failed.
        swapped = {name: report for name, report in swapped.items() if self._replicas.get(name) is members[name]}
        failed = {name: error for name, error in failed.items() if self._replicas.get(name) is members[name]}
        self._fenced.update(failed)
        if not swapped:
            causes = "; ".join(self._fenced.values()) or "there is none"
            raise SyncError(f"version {Version.unpack(version)} reached no replica: {causes}")
        for name in swapped:
            self._count_in(name)
        self._newest = manifest
        return WeightUpdate(
            version=version,
            manifest=manifest,
            publication=publication,
            staged={name: staged[name] for name in swapped},
            swapped=swapped,
            fenced=self.fenced,
            phases=phases,
            verified=all(staged[name].digest == manifest.digest == swapped[name].digest for name in swapped),
        )

    def _count_in(self, name: str) -> None:
        """It has confirmed the newest version."""
        self._fenced.pop(name, None)
        self._dead.discard(name)

    def _members(self) -> dict[str, ReplicaControl]:
        """Whom a version goes to: not the fenced, who would delay the others, unless there is nobody else."""
        alive = {name: replica for name, replica in self._replicas.items() if name not in self._dead}
        left_out = self._fenced.keys() - self._joining
        return {name: replica for name, replica in alive.items() if name not in left_out} or alive

    async def _serves(self, name: str, replica: ReplicaControl, manifest: WeightManifest) -> bool:
        """Whether this replica serves the version already: a confirmation was lost on its way."""
        report = await self._bounded(replica.report(), "a report", name)
        if (report.state, report.version, report.digest) != ("ready", manifest.version, manifest.digest):
            return False
        self._events.emit(
            SyncConfirmed(replica=name, version=manifest.version, pause_seconds=0.0, digest=report.digest)
        )
        return True

    async def _capture(self, version: int) -> CaptureReport:
        command = CaptureCommand(
            version=version,
            sync_id=self._sync_id(),
            deadline_wall=self._deadline(),
            base_version=None if self._newest is None else self._newest.version,
        )
        report = await self._bounded(self._trainer.capture_weights(command), "the snapshot", "trainer")
        self._events.emit(
            SyncCaptured(
                version=version,
                bytes=report.bytes,
                digest=report.digest,
                seconds=report.seconds,
                wait_seconds=report.wait_seconds,
            )
        )
        return report

    async def _publish(self, version: int) -> PublishReport:
        command = PublishCommand(version=version, sync_id=self._sync_id(), deadline_wall=self._deadline())
        return await self._bounded(self._trainer.publish_weights(command), "the publication", "trainer")

    async def _stage(self, name: str, replica: ReplicaControl, manifest: WeightManifest) -> StageReport:
        command = StageCommand(manifest=manifest, sync_id=self._sync_id(), deadline_wall=self._deadline())
        report = await self._bounded(replica.stage(command), "staged weights", name)
        verified = report.digest == manifest.digest
        if self._verify != "off" and not verified:
            raise SyncError(f"{name} staged {report.digest or 'unverified bytes'}, not {manifest.digest}")
        self._events.emit(SyncStaged(replica=name, version=report.version, seconds=report.seconds, verified=verified))
        return report

    async def _swap(self, name: str, replica: ReplicaControl, manifest: WeightManifest) -> SwapReport:
        async with self._at_once:
            command = SwapCommand(version=manifest.version, sync_id=self._sync_id(), deadline_wall=self._deadline())
            report = await self._bounded(replica.swap(command), "the swap", name)
        if report.digest != manifest.digest:
            raise SyncError(f"{name} serves {report.digest}, not {manifest.digest}")
        if self._replicas.get(name) is not replica:  # it has left, or another process goes by its name
            self._events.emit(ZombiesRefused(replica=name, completions=0, confirmations=1))
            return report
        self._events.emit(
            SyncConfirmed(
                replica=name, version=report.version, pause_seconds=report.pause_seconds, digest=report.digest
            )
        )
        return report

    async def _on_each(
        self,
        replicas: Mapping[str, ReplicaControl],
        call: Callable[[str, ReplicaControl, WeightManifest], Awaitable[R]],
        manifest: WeightManifest,
        failed: dict[str, str],
    ) -> dict[str, R]:
        """Results by name; a replica's own error goes into `failed`, anything else is raised."""
        calls = (call(name, replica, manifest) for name, replica in replicas.items())
        results = await asyncio.gather(*calls, return_exceptions=True)
        done: dict[str, R] = {}
        for name, result in zip(replicas, results, strict=True):
            if isinstance(result, PacelineError):
                failed[name] = result.message
                if isinstance(result, WorkerDied) and self._replicas.get(name) is replicas[name]:
                    self._dead.add(name)
            elif isinstance(result, asyncio.CancelledError):
                failed[name] = f"the call to {name} was cancelled"
            elif isinstance(result, BaseException):
                raise result
            else:
                done[name] = result
        return done

    async def _discard(self, replicas: Mapping[str, ReplicaControl], version: int) -> None:
        calls = [
            self._bounded(replica.discard_staged(version), "a discard", name) for name, replica in replicas.items()
        ]
        await asyncio.gather(*calls, return_exceptions=True)  # a replica that is gone holds nothing

    async def _bounded(self, awaitable: Awaitable[R], what: str, culprit: str) -> R:
        seconds = self._timeout_seconds + min(MOST_PATIENCE_SECONDS, self._timeout_seconds / 10)
        return await self._waits.bounded(awaitable, seconds=seconds, what=what, culprit=culprit)

    def _deadline(self) -> float:
        return self._clock.wall() + self._timeout_seconds

    def _sync_id(self) -> int:
        self._next_sync_id += 1
        return self._next_sync_id
