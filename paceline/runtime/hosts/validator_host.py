"""The process of the trainer's side of validations, on the trainer's node.

A process of its own: an update keeps its threads and its interpreter lock while a validation runs, the engine reads
weights that no optimiser touches, and the death of the one is not the death of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import SyncError
from paceline.core.object_transport import ObjectTransport
from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest
from paceline.runtime import registry
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import ThreadWork
from paceline.sync.weight_transaction import WeightTransaction
from paceline.train.validation_worker import ValidationWorker


class ValidatorHost:
    """Holds a `ValidationWorker`."""

    def __init__(self, spec: RunSpec, role: str, objects: ObjectTransport) -> None:
        self._process = HostProcess(spec, role)
        self._objects = objects
        self._worker: ValidationWorker | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Import the engine's libraries and build it, without weights."""
        self._engine = await asyncio.to_thread(self._new_engine)
        self._process.started()

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """Snapshots are the trainer's."""
        self._worker = ValidationWorker(
            engine=self._engine,
            make_transaction=self._new_transaction,
            snapshots=peers["trainer"],
            work=ThreadWork("validate"),
            clock=self._process.clock,
            events=self._process.events,
        )

    async def run(self) -> None:
        """Serve until stopped."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Let `run` return."""
        self._process.events.close()
        self._stopped.set()

    async def generate(
        self, version: int, requests: Sequence[GenerationRequest], deadline_wall: float
    ) -> list[Completion]:
        """See `ValidationWorker`."""
        if self._worker is None:
            raise SyncError(f"{self._process.role} is not connected yet")
        return await self._worker.generate(version, requests, deadline_wall)

    def _new_engine(self) -> InferenceEngine:
        process = self._process
        return registry.engine_factory(process.spec, process.role, max(1, process.threads))()

    def _new_transaction(self) -> WeightTransaction:
        spec, role = self._process.spec, self._process.role
        return WeightTransaction(
            replica_id=role,
            life=spec.life,
            receiver=registry.build_receiver(spec, role, self._objects),
            board=registry.build_board(spec, role),
            clock=self._process.clock,
            rules=registry.build_coverage_rules(spec.config),
        )
