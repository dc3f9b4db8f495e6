"""The process of one inference replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paceline.core.commands import (
    ExchangeReply,
    ExchangeRequest,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.errors import SyncError
from paceline.core.object_transport import ObjectTransport
from paceline.rollout.replica import Replica
from paceline.rollout.served_replica import ServedReplica
from paceline.runtime import registry, serving
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import ThreadWork
from paceline.runtime.worker_proof import leave_note
from paceline.sync.weight_transaction import WeightTransaction


class ReplicaHost:
    """Holds one `Replica` (decoding and staging have a thread each), or one `ServedReplica` over its server."""

    def __init__(self, spec: RunSpec, role: str, objects: ObjectTransport) -> None:
        self._process = HostProcess(spec, role)
        self._objects = objects
        self._replica: Replica | ServedReplica | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Import the engine's libraries and build it, without weights; or meet the server."""
        if serving.is_served(self._process.spec.config):
            await self._start_served()
        else:
            await self._start_embedded()
        self._process.started()

    async def _start_served(self) -> None:
        process = self._process
        server = serving.build_server(process.spec, process.role, process.threads)
        await server.start()
        self._replica = serving.build_served_replica(process.spec, process.role, server, process.clock, process.events)
        leave_note(process.spec, process.role)

    async def _start_embedded(self) -> None:
        process = self._process
        threads = max(1, process.threads)  # one that joins a running fleet is in no plan
        await asyncio.to_thread(registry.warm_up_deltas, process.spec.config)
        make_engine = await asyncio.to_thread(registry.engine_factory, process.spec, process.role, threads)
        transaction = WeightTransaction(
            replica_id=process.role,
            life=process.spec.life,
            receiver=registry.build_receiver(process.spec, process.role, self._objects),
            board=registry.build_board(process.spec, process.role),
            clock=process.clock,
            rules=registry.build_coverage_rules(process.spec.config),
        )
        self._replica = Replica(
            replica_id=process.role,
            make_engine=make_engine,
            transaction=transaction,
            partial_rollout=process.spec.config.async_training.partial_rollout,
            drain_seconds=process.spec.config.rollout.drain_timeout_seconds,
            decode_work=ThreadWork("decode"),
            stage_work=ThreadWork("stage"),
            clock=process.clock,
            events=process.events,
            journal=registry.build_journal(process.spec, process.role),
        )

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """A replica calls nobody."""

    async def run(self) -> None:
        """Decode until stopped."""
        await self._started().run()
        self._stopped.set()

    async def stop(self) -> None:
        """End the decode loop, release the weights."""
        if self._replica is not None:
            await self._replica.close()
            await self._stopped.wait()
        self._process.events.close()

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """See `Replica`."""
        return await self._started().exchange(request)

    async def stage(self, command: StageCommand) -> StageReport:
        """See `Replica`."""
        return await self._started().stage(command)

    async def swap(self, command: SwapCommand) -> SwapReport:
        """See `Replica`."""
        return await self._started().swap(command)

    async def discard_staged(self, version: int) -> None:
        """See `Replica`."""
        await self._started().discard_staged(version)

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """See `Replica`."""
        return await self._started().pin(version, deadline_wall)

    async def unpin(self, version: int) -> None:
        """See `Replica`."""
        await self._started().unpin(version)

    async def pause(self) -> None:
        """See `Replica`."""
        await self._started().pause()

    async def resume(self) -> None:
        """See `Replica`."""
        await self._started().resume()

    async def report(self) -> ReplicaReport:
        """See `Replica`."""
        return await self._started().report()

    def _started(self) -> Replica | ServedReplica:
        if self._replica is None:
            raise SyncError(f"{self._process.role} is not started yet")
        return self._replica
