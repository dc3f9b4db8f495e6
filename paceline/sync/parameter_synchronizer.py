"""ParameterSynchronizer: the one writer of the published version (V2).

    IDLE -> CAPTURED -> STAGED -> CONFIRMED -> PUBLISHED -> IDLE, or ABORTED from any of them (nothing is published).

Order of a sync: the manager publishes, stages and swaps while replicas generate; then the queue learns the version,
then the rollouter (which may start a validation that pins it; nobody waits for that). Versions rise strictly;
concurrent calls are serialised, and one whose version is no longer newer gets `Superseded`. An engine that cannot
stage would need the reference order (pause, transfer, resume); `rollouter.pause/resume` serve it and users, the
embedded engine pauses inside its swap.
"""

from __future__ import annotations

import asyncio

from paceline.core.commands import SyncReport
from paceline.core.config import Config
from paceline.core.errors import PacelineError, Superseded
from paceline.core.events import EventSink, SyncAborted, SyncCompleted
from paceline.core.ports import Clock, QueueControl, ReplicaControl, RolloutControl, TrainerControl
from paceline.core.version import Version
from paceline.core.waits import Waits
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate


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
        replicas: list[ReplicaControl] | None = None,
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
        self._stall_seconds = config.trainer.stall_timeout_seconds
        self._waits = Waits(who="parameter synchronizer", clock=clock, events=events)
        self._one_at_a_time = asyncio.Lock()
        self._published = -1
        self._phase = "idle"

    def get_current_param_version(self) -> int:
        """The published version (packed), -1 before the first."""
        return self._published

    async def sync_weights(
        self, version: int, validate: bool = False, global_steps: int = 0, use_trainer_do_validate: bool = False
    ) -> SyncReport:
        """Bring `version` (packed) to every replica and publish it; returns once all have confirmed.

        Raises:
            Superseded: a version at least as new is already published. SyncError, DeadlineExceeded, WorkerDied:
            nothing was
                published; the message names who failed in which phase.
        """
        async with self._one_at_a_time:
            if version <= self._published:
                raise Superseded(
                    f"version {Version.unpack(version)} is not newer than the published {self._published_name()}"
                )
            began = self._clock.now()
            try:
                self._phase = "update_weights"
                update = await self._manager.update_weights(global_steps, version=version)
                await self._publish(version, validate, global_steps, use_trainer_do_validate)
            except PacelineError as error:
                self._events.emit(SyncAborted(version=version, phase=self._phase, error=error.message))
                raise
            finally:
                self._phase = "idle"
            return self._completed(update, self._clock.now() - began)

    async def wait_last_valid(self) -> None:
        """Wait for the last sync and its validation.

        Raises:
            DeadlineExceeded: naming the part that did not end.
        """
        async with self._one_at_a_time:
            await self._waits.bounded(
                self._rollouter.wait_validations(),
                seconds=self._stall_seconds,
                what="the last validation",
                culprit="rollouter",
            )

    async def rollouter_save_checkpoint(self, local_global_step_folder: str) -> None:
        """Have the rollouter save its part of a checkpoint; waits for a sync in progress."""
        async with self._one_at_a_time:
            await self._waits.bounded(
                self._rollouter.save_checkpoint(local_global_step_folder),
                seconds=self._timeout_seconds,
                what="the rollouter's part of a checkpoint",
                culprit="rollouter",
            )

    async def _publish(self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool) -> None:
        self._phase = "publish"
        await self._waits.bounded(
            self._mq.update_param_version(version),
            seconds=self._timeout_seconds,
            what="the version in the message queue",
            culprit="message queue",
        )
        await self._waits.bounded(
            self._rollouter.update_param_version(version, validate, global_steps, use_trainer_do_validate),
            seconds=self._timeout_seconds,
            what="the version in the rollouter",
            culprit="rollouter",
        )
        self._published = version

    def _completed(self, update: WeightUpdate, seconds: float) -> SyncReport:
        pauses = {name: report.pause_seconds for name, report in update.swapped.items()}
        total_bytes = update.capture.manifest.total_bytes
        self._events.emit(
            SyncCompleted(
                version=update.version,
                mode="full",
                bytes=total_bytes,
                seconds=seconds,
                phases=update.phases,
                pauses=pauses,
                fenced=[],
                verified=update.verified,
            )
        )
        return SyncReport(
            version=update.version,
            published=self._published,
            base_version=update.capture.manifest.base_version,
            mode="full",
            bytes=total_bytes,
            seconds=seconds,
            phases=update.phases,
            confirmed={name: report.version for name, report in update.swapped.items()},
            pauses=pauses,
            fenced={},
            verified=update.verified,
        )

    def _published_name(self) -> str:
        return "none" if self._published < 0 else str(Version.unpack(self._published))
