"""ParameterSynchronizer: the one writer of the published version (V2).

    IDLE -> CAPTURED -> PUBLISHED -> STAGED -> CONFIRMED -> IDLE, or ABORTED from any of them (nothing is announced).

Order of a sync: the manager captures, stages and swaps while replicas generate; the rollouter learns who serves the
version and who is fenced; the queue learns the version; the rollouter opens its window (and may start a validation
that pins the version; nobody waits for that). Versions rise strictly; concurrent calls are serialised, and one whose
version is no longer newer gets `Superseded`. A sync that has begun goes on when its caller is cancelled: half a
version is never left behind. Fenced and new replicas catch up beside all this, and delay nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Literal

from paceline.core.commands import SyncReport
from paceline.core.config import Config
from paceline.core.errors import DeadlineExceeded, NonFiniteWeights, PacelineError, Superseded, SyncError, WorkerDied
from paceline.core.events import CatchUpFailed, EventSink, SyncAborted, SyncCompleted, SyncSkipped
from paceline.core.ports import Clock, QueueControl, ReplicaControl, RolloutControl, TrainerControl
from paceline.core.version import Version
from paceline.core.waits import Waits
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate

CATCH_UP_PAUSE_SECONDS = 1.0


class ParameterSynchronizer:
    """Moves a version from the trainer to the rollout side and publishes it.

    `ParameterSynchronizer(config, trainer, rollouter, mq, ...)`: `trainer`, `rollouter` and `mq` are the parts
    themselves or handles on their processes.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainerControl,
        rollouter: RolloutControl,
        mq: QueueControl,
        *,
        clock: Clock,
        events: EventSink,
        replicas: Sequence[ReplicaControl] | None = None,
    ) -> None:
        self._rollouter = rollouter
        self._mq = mq
        self._clock = clock
        self._events = events
        self._manager = CheckpointEngineManager(
            config,
            trainer,
            rollouter.get_rollout_wg() if replicas is None else replicas,
            clock=clock,
            events=events,
        )
        self._timeout_seconds = config.checkpoint_engine.sync_timeout_seconds
        self._skip_nonfinite = config.checkpoint_engine.nonfinite == "skip"
        self._return_seconds = config.rollout.replica_return_seconds
        self._stall_seconds = config.trainer.stall_timeout_seconds
        self._waits = Waits(who="parameter synchronizer", clock=clock, events=events)
        self._turn = asyncio.Lock()
        self._published = -1
        self._catching_up: dict[str, asyncio.Task[None]] = {}

    def get_current_param_version(self) -> int:
        """The published version (packed), -1 before the first."""
        return self._published

    async def sync_weights(
        self, version: int, validate: bool = False, global_steps: int = 0, use_trainer_do_validate: bool = False
    ) -> SyncReport:
        """Bring `version` (packed) to every replica and publish it; returns once all have confirmed or are fenced.

        `use_trainer_do_validate` is handed on to the rollouter, which then gives the trainer's side its share of the
        validation.

        Raises:
            NonFiniteWeights: nothing was published; with `nonfinite=skip` the run may go on under the version before.
            Superseded: a version at least as new is already published. SyncError, DeadlineExceeded, WorkerDied: nothing
                was published; the message names who failed in which phase.
        """
        await self._take_turn()
        working = asyncio.ensure_future(self._sync(version, validate, global_steps, use_trainer_do_validate))
        working.add_done_callback(self._end_turn)
        return await asyncio.shield(working)

    async def wait_last_valid(self) -> None:
        """Wait for the last sync and its validation.

        Raises:
            DeadlineExceeded: naming the part that did not end.
        """
        async with self._turn:
            await self._waits.bounded(
                self._rollouter.wait_validations(),
                seconds=self._stall_seconds,
                what="the last validation",
                culprit="rollouter",
            )

    async def rollouter_save_checkpoint(self, local_global_step_folder: str) -> None:
        """Have the rollouter save its part of a checkpoint; waits for a sync in progress."""
        async with self._turn:
            await self._bounded(
                self._rollouter.save_checkpoint(local_global_step_folder), "the rollouter's checkpoint", "rollouter"
            )

    async def add_replicas(self, replicas: Sequence[ReplicaControl]) -> None:
        """Replicas join a running fleet, or return under their old name; traffic comes after their first version.

        They wait for a sync in progress, so that no confirmation of a dead process is taken for theirs.
        """
        async with self._turn:
            for replica in replicas:
                self._stop_catching_up(replica.replica_id)
                self._manager.remove_replicas([replica.replica_id])
                await self._bounded(self._rollouter.add_replica(replica), "a new replica in the rollouter", "rollouter")
                self._manager.add_replicas([replica])
        self._catch_up_in_background()

    async def remove_replicas(self, replica_ids: Sequence[str]) -> None:
        """Replicas leave; what they owed is done by the others."""
        self._manager.remove_replicas(replica_ids)
        for replica_id in replica_ids:
            self._stop_catching_up(replica_id)
            await self._bounded(self._rollouter.remove_replica(replica_id), "a removal in the rollouter", "rollouter")

    # -- one sync ------------------------------------------------------------------------------------------------------

    async def _sync(self, version: int, validate: bool, global_steps: int, use_trainer: bool) -> SyncReport:
        if version <= self._published:
            raise Superseded(
                f"version {Version.unpack(version)} is not newer than the published {self._published_name()}"
            )
        began = self._clock.now()
        phase = "update_weights"
        try:
            update = await self._manager.update_weights(global_steps, version=version)
            phase, confirmed_at = "publish", self._clock.now()
            await self._publish(update, validate, global_steps, use_trainer)
        except PacelineError as error:
            if self._skips(error):
                self._events.emit(SyncSkipped(version=version, error=error.message))
                await self._reopen_window(global_steps, use_trainer)
            else:
                self._events.emit(SyncAborted(version=version, phase=phase, error=error.message))
            raise
        except asyncio.CancelledError as error:  # a caller's cancellation does not reach this task: a part was ended
            message = f"version {Version.unpack(version)} was cancelled in {phase}"
            self._events.emit(SyncAborted(version=version, phase=phase, error=message))
            raise SyncError(message) from error
        self._catch_up_in_background()
        ended = self._clock.now()
        return self._completed(update, {**update.phases, "publish": ended - confirmed_at}, ended - began)

    async def _reopen_window(self, global_steps: int, use_trainer: bool) -> None:
        """The version stays, but the trainer goes on: it needs as many samples again before it can try once more."""
        await self._bounded(
            self._rollouter.update_param_version(self._published, False, global_steps, use_trainer),
            "a new window in the rollouter",
            "rollouter",
        )

    def _skips(self, error: PacelineError) -> bool:
        return self._skip_nonfinite and self._published >= 0 and isinstance(error, NonFiniteWeights)

    async def _take_turn(self) -> None:
        """Nobody else syncs, and there is somebody to sync with."""
        await self._turn.acquire()
        while not self._manager.has_members:
            self._turn.release()  # a replica joins in a turn of its own
            await self._waits.bounded(
                self._manager.somebody_joins(), seconds=self._return_seconds, what="a replica", culprit="every replica"
            )
            await self._turn.acquire()

    def _end_turn(self, working: asyncio.Future[SyncReport]) -> None:
        self._turn.release()
        if not working.cancelled():
            working.exception()  # the caller may be gone; whoever is there has it from the shield

    async def _publish(self, update: WeightUpdate, validate: bool, global_steps: int, use_trainer: bool) -> None:
        confirmed = {name: report.version for name, report in update.swapped.items()}
        await self._bounded(
            self._rollouter.confirm_replicas(confirmed, update.fenced), "the confirmed replicas", "rollouter"
        )
        await self._bounded(self._mq.update_param_version(update.version), "the version in the queue", "message queue")
        self._published = update.version
        await self._bounded(
            self._rollouter.update_param_version(update.version, validate, global_steps, use_trainer),
            "the version in the rollouter",
            "rollouter",
        )

    def _catch_up_in_background(self) -> None:
        for replica_id in self._manager.fenced:
            if replica_id not in self._catching_up and self._published >= 0:
                self._catching_up[replica_id] = asyncio.ensure_future(self._catch_up(replica_id))

    def _stop_catching_up(self, replica_id: str) -> None:
        catching_up = self._catching_up.pop(replica_id, None)
        if catching_up is not None:
            catching_up.cancel()

    async def _catch_up(self, replica_id: str) -> None:
        """Until it has caught up, left, or died: whoever starts it again adds it again."""
        try:
            while replica_id in self._manager.fenced:
                try:
                    version = await self._manager.catch_up(replica_id)
                    await self._bounded(
                        self._rollouter.confirm_replicas({replica_id: version}, {}), "a replica's return", "rollouter"
                    )
                except PacelineError as error:
                    self._events.emit(CatchUpFailed(replica=replica_id, error=error.message))
                    if isinstance(error, WorkerDied | DeadlineExceeded):
                        await self._give_up(replica_id, error)
                        return
                    await self._clock.sleep(CATCH_UP_PAUSE_SECONDS)
        finally:
            if self._catching_up.get(replica_id) is asyncio.current_task():
                del self._catching_up[replica_id]

    async def _give_up(self, replica_id: str, error: PacelineError) -> None:
        """It is dead or stands still: whoever starts replicas again learns it from the rollouter."""
        try:
            await self._bounded(self._rollouter.lose_replica(replica_id, error.message), "a loss", "rollouter")
        except PacelineError as unheard:
            self._events.emit(CatchUpFailed(replica=replica_id, error=unheard.message))

    async def _bounded(self, awaitable: Awaitable[None], what: str, culprit: str) -> None:
        await self._waits.bounded(awaitable, seconds=self._timeout_seconds, what=what, culprit=culprit)

    def _completed(self, update: WeightUpdate, phases: dict[str, float], seconds: float) -> SyncReport:
        pauses = {name: report.pause_seconds for name, report in update.swapped.items()}
        published = update.publication.published
        bases = {report.base_version for report in update.staged.values()}
        base_version = bases.pop() if len(bases) == 1 else None  # else some replica took the full version
        mode: Literal["full", "delta"] = "full" if base_version is None else "delta"
        moved = max(report.bytes for report in update.staged.values())
        self._events.emit(
            SyncCompleted(
                version=update.version,
                mode=mode,
                bytes=moved,
                seconds=seconds,
                phases=phases,
                pauses=pauses,
                fenced=sorted(update.fenced),
                verified=update.verified,
                base_version=base_version,
                full_bytes=update.manifest.total_bytes,
                changed_share=published.changed_share,
                encode_seconds=published.encode_seconds,
            )
        )
        return SyncReport(
            version=update.version,
            published=self._published,
            base_version=base_version,
            mode=mode,
            bytes=moved,
            seconds=seconds,
            phases=phases,
            confirmed={name: report.version for name, report in update.swapped.items()},
            pauses=pauses,
            fenced=update.fenced,
            verified=update.verified,
            publish_lag_seconds=seconds - phases["capture"],
            full_bytes=update.manifest.total_bytes,
            changed_share=published.changed_share,
            encode_seconds=published.encode_seconds,
        )

    def _published_name(self) -> str:
        return "none" if self._published < 0 else str(Version.unpack(self._published))
