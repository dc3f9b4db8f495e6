"""The process of the trainer: the actor worker group of one rank, and the writer of the node's weight store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.commands import CaptureCommand, CaptureReport, PublishCommand, PublishReport
from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.object_transport import ObjectTransport
from paceline.core.weight_ports import WeightSender
from paceline.observability.rollout_log import JsonlRolloutLog
from paceline.runtime import registry
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import ThreadWork
from paceline.train.checkpoint import Checkpointer, TrainerStand
from paceline.train.trainer import FullyAsyncTrainer

SETTLE_SECONDS = 2.0


class TrainerHost:
    """Holds the `FullyAsyncTrainer`; updates and snapshots share one thread, publications have another."""

    def __init__(self, spec: RunSpec, role: str, objects: ObjectTransport) -> None:
        self._process = HostProcess(spec, role)
        self._objects = objects
        self._trainer: FullyAsyncTrainer | None = None
        self._sender: WeightSender | None = None
        self._peers: Mapping[str, Any] = {}

    async def start(self) -> None:
        """Load the model, make the arenas' store."""
        process = self._process
        self._backend = await asyncio.to_thread(registry.build_backend, process.spec, process.threads)
        await asyncio.to_thread(registry.warm_up_deltas, process.spec.config)
        self._sender = registry.build_sender(process.spec, process.threads, self._objects)
        resumed = process.spec.resumed
        if resumed is not None:
            await asyncio.to_thread(self._backend.load_state, resumed.checkpoint)
        process.started()

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """Build the trainer over the queue; the synchronizer is called when it fits."""
        process = self._process
        if self._sender is None:
            raise SyncError("the trainer is not started yet")
        self._peers = peers
        self._rollout_log = JsonlRolloutLog(Path(process.spec.run_dir) / "rollouts")
        spec, work = process.spec, ThreadWork("update")
        resumed = spec.resumed
        self._trainer = FullyAsyncTrainer(
            spec.config,
            life=spec.life,
            backend=self._backend,
            sender=self._sender,
            queue=peers["message_queue"],
            source=peers["rollouter"],
            work=work,
            publish_work=ThreadWork("publish"),
            rollout_log=self._rollout_log,
            clock=process.clock,
            events=process.events,
            lineage=spec.descent,
            resumed_at=None if resumed is None else TrainerStand(resumed.step, resumed.updates_since_sync),
            checkpointer=Checkpointer(
                spec.config,
                run_id=spec.run_id,
                lineage=spec.descent,
                store=registry.build_checkpoints(spec),
                backend=self._backend,
                source=peers["rollouter"],
                queue=peers["message_queue"],
                work=work,
                clock=process.clock,
                events=process.events,
                saved_step=0 if resumed is None else resumed.step,
            ),
        )

    async def run(self) -> None:
        """Train to the end of the data, then save the model."""
        trainer = self._connected()
        await trainer.fit(self._peers["synchronizer"])
        await trainer.save_pretrained(str(Path(self._process.spec.run_dir) / "model"))

    async def stop(self) -> None:
        """Release the arenas."""
        if self._trainer is not None:
            await self._trainer.settle(SETTLE_SECONDS)
            self._rollout_log.close()
        if self._sender is not None:
            self._sender.close()
        self._process.events.close()

    async def preempt(self) -> None:
        """See `FullyAsyncTrainer`."""
        await self._connected().preempt()

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """See `FullyAsyncTrainer`."""
        return await self._connected().capture_weights(command)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """See `FullyAsyncTrainer`."""
        return await self._connected().publish_weights(command)

    async def captured_manifest(self, version: int) -> WeightManifest:
        """See `FullyAsyncTrainer`."""
        return await self._connected().captured_manifest(version)

    def _connected(self) -> FullyAsyncTrainer:
        if self._trainer is None:
            raise SyncError("the trainer is not connected yet")
        return self._trainer
