"""The process of the parameter synchronizer; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.commands import SyncReport
from paceline.core.errors import SyncError
from paceline.core.ports import ReplicaControl
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.spec import RunSpec
from paceline.sync.parameter_synchronizer import ParameterSynchronizer


class SynchronizerHost:
    """Holds the `ParameterSynchronizer`."""

    def __init__(self, spec: RunSpec, role: str) -> None:
        self._process = HostProcess(spec, role)
        self._synchronizer: ParameterSynchronizer | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Nothing to build before the others are known."""
        self._process.started()

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """Build the synchronizer over the other processes."""
        spec = self._process.spec
        self._synchronizer = ParameterSynchronizer(
            spec.config,
            peers["trainer"],
            peers["rollouter"],
            peers["message_queue"],
            replicas=[peers[replica_id] for replica_id in spec.replica_ids],
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

    async def sync_weights(
        self, version: int, validate: bool = False, global_steps: int = 0, use_trainer_do_validate: bool = False
    ) -> SyncReport:
        """See `ParameterSynchronizer`."""
        return await self._connected().sync_weights(version, validate, global_steps, use_trainer_do_validate)

    async def wait_last_valid(self) -> None:
        """See `ParameterSynchronizer`."""
        await self._connected().wait_last_valid()

    async def rollouter_save_checkpoint(self, local_global_step_folder: str) -> None:
        """See `ParameterSynchronizer`."""
        await self._connected().rollouter_save_checkpoint(local_global_step_folder)

    async def add_replicas(self, replicas: Sequence[ReplicaControl]) -> None:
        """See `ParameterSynchronizer`."""
        await self._connected().add_replicas(replicas)

    async def remove_replicas(self, replica_ids: Sequence[str]) -> None:
        """See `ParameterSynchronizer`."""
        await self._connected().remove_replicas(replica_ids)

    def _connected(self) -> ParameterSynchronizer:
        if self._synchronizer is None:
            raise SyncError("the parameter synchronizer is not connected yet")
        return self._synchronizer
