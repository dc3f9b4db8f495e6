"""LocalRuntime: all parts of a run on one event loop, in one process.

The same loops as on Ray, handed other ports: for tests, notebooks and simulation under the virtual clock. Nothing is
started but tasks of the running loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.checkpoint_ports import CheckpointStore, TokenJournal
from paceline.core.config import Config
from paceline.core.errors import QueueClosed
from paceline.core.events import EventSink
from paceline.core.manifest import WeightManifest
from paceline.core.ports import (
    VALIDATOR,
    Clock,
    InferenceEngine,
    PromptSource,
    ReplicaControl,
    RewardFn,
    RolloutLog,
    TextDecoder,
    TrainBackend,
    Work,
)
from paceline.core.tasks import run_together
from paceline.core.version import Lineage
from paceline.core.weight_ports import ServingBoard, WeightReceiver, WeightSender
from paceline.message_queue import MessageQueue
from paceline.rollout.replica import Replica
from paceline.rollout.resumption import Resumption
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.runtime import registry
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.sync.weight_transaction import WeightTransaction
from paceline.train.checkpoint import Checkpointer, TrainerStand
from paceline.train.trainer import FullyAsyncTrainer
from paceline.train.validation_worker import ValidationWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPorts:
    """The adapters of a local run. `make_engine(i)`, `make_receiver(i)` and `make_journal(i)` serve replica i, the
    number after the last replica is the trainer's side of validations; without `store` no checkpoint is taken.
    """

    backend: TrainBackend
    sender: WeightSender
    make_engine: Callable[[int], InferenceEngine]
    make_receiver: Callable[[int], WeightReceiver]
    board: ServingBoard
    prompts: PromptSource
    reward: RewardFn
    decoder: TextDecoder
    stop_token_ids: tuple[int, ...]
    rollout_log: RolloutLog
    work: Work
    clock: Clock
    events: EventSink
    store: CheckpointStore | None = None
    make_journal: Callable[[int], TokenJournal] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResume:
    """What a local run goes on from; prompts and backend are where they were already."""

    resumption: Resumption
    lineage: Lineage
    stand: TrainerStand


class LocalRuntime:
    """Builds the parts from `config` and `ports`; `run` trains to the end of the data."""

    def __init__(self, config: Config, ports: LocalPorts, *, life: int, resume: LocalResume | None = None) -> None:
        clock, events = ports.clock, ports.events
        lineage = Lineage(life) if resume is None else resume.lineage
        self.replicas = [_replica(config, ports, life, index) for index in range(config.rollout.num_replicas)]
        self.queue = MessageQueue(
            capacity=config.max_required_samples,
            producers=["rollouter"],
            put_timeout_seconds=config.trainer.stall_timeout_seconds,
            clock=clock,
            events=events,
        )
        controls: Sequence[ReplicaControl] = self.replicas
        self.rollouter = FullyAsyncRollouter(
            config,
            life=life,
            prompts=ports.prompts,
            replicas=controls,
            queue=self.queue,
            reward=ports.reward,
            decoder=ports.decoder,
            stop_token_ids=ports.stop_token_ids,
            clock=clock,
            events=events,
            resumption=None if resume is None else resume.resumption,
            trainer_side=self._trainer_side(config, ports, life),
        )
        self.trainer = FullyAsyncTrainer(
            config,
            life=life,
            backend=ports.backend,
            sender=ports.sender,
            queue=self.queue,
            source=self.rollouter,
            work=ports.work,
            publish_work=ports.work,
            rollout_log=ports.rollout_log,
            clock=clock,
            events=events,
            lineage=lineage,
            resumed_at=None if resume is None else resume.stand,
            checkpointer=self._checkpointer(config, ports, lineage, 0 if resume is None else resume.stand.step),
        )
        self.synchronizer = ParameterSynchronizer(
            config, self.trainer, self.rollouter, self.queue, clock=clock, events=events
        )

    async def captured_manifest(self, version: int) -> WeightManifest:
        """Of the trainer, which is built after what asks for it."""
        return await self.trainer.captured_manifest(version)

    def _trainer_side(self, config: Config, ports: LocalPorts, life: int) -> ValidationWorker | None:
        if not config.async_training.use_trainer_do_validate:
            return None
        index = config.rollout.num_replicas
        return ValidationWorker(
            engine=ports.make_engine(index),
            make_transaction=lambda: _transaction(config, ports, life, index, VALIDATOR),
            snapshots=self,
            work=ports.work,
            clock=ports.clock,
            events=ports.events,
        )

    async def run(self) -> None:
        """Train; the first error of any part ends all and is raised."""
        serving = asyncio.ensure_future(self._serve())
        training = asyncio.ensure_future(self.trainer.fit(self.synchronizer))
        try:
            await asyncio.wait({serving, training}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await training
        finally:
            for task in (serving, training):
                task.cancel()
            await asyncio.gather(serving, training, return_exceptions=True)
            for replica in self.replicas:
                await replica.close()
            await self.queue.shutdown()

    def _checkpointer(
        self, config: Config, ports: LocalPorts, lineage: Lineage, saved_step: int
    ) -> Checkpointer | None:
        if ports.store is None:
            return None
        return Checkpointer(
            config,
            run_id="local",
            lineage=lineage,
            store=ports.store,
            backend=ports.backend,
            source=self.rollouter,
            queue=self.queue,
            work=ports.work,
            clock=ports.clock,
            events=ports.events,
            saved_step=saved_step,
        )

    async def _serve(self) -> None:
        await run_together(self._roll_out(), *(replica.run() for replica in self.replicas))

    async def _roll_out(self) -> None:
        try:
            await self.rollouter.fit()
        except QueueClosed:
            return  # the trainer has all it wanted and the queue was shut down


def _replica(config: Config, ports: LocalPorts, life: int, index: int) -> Replica:
    replica_id = f"replica-{index}"
    return Replica(
        replica_id=replica_id,
        make_engine=lambda: ports.make_engine(index),
        transaction=_transaction(config, ports, life, index, replica_id),
        partial_rollout=config.async_training.partial_rollout,
        drain_seconds=config.rollout.drain_timeout_seconds,
        decode_work=ports.work,
        stage_work=ports.work,
        clock=ports.clock,
        events=ports.events,
        journal=None if ports.make_journal is None else ports.make_journal(index),
    )


def _transaction(config: Config, ports: LocalPorts, life: int, index: int, name: str) -> WeightTransaction:
    return WeightTransaction(
        replica_id=name,
        life=life,
        receiver=ports.make_receiver(index),
        board=ports.board,
        clock=ports.clock,
        rules=registry.build_coverage_rules(config),
    )
