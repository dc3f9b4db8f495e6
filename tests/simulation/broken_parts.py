"""Parts that break one law each, to see that the checker bites."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from paceline.core.commands import SwapCommand, SwapReport, SyncReport
from paceline.core.errors import PacelineError
from paceline.core.version import Version
from paceline.rollout.replica import Replica
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.rollout.step_swap import StepSwap
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager, WeightUpdate
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.testing.marker_model import MarkerEngine


class BumpsBeforeTransfer(ParameterSynchronizer):
    """Tells the queue the version before a replica serves it."""

    async def _sync(self, version: int, validate: bool, global_steps: int, use_trainer: bool) -> SyncReport:
        await self._mq.update_param_version(version)
        return await super()._sync(version, validate, global_steps, use_trainer)


class StaysPausedOnError(Replica):
    """Pauses for a swap and does not resume when it fails."""

    def _swap_now(self, command: SwapCommand, swap: StepSwap) -> tuple[SwapReport, asyncio.Future[None]]:
        try:
            return super()._swap_now(command, swap)
        except PacelineError:
            self._paused = True
            raise


class _HastyManager(CheckpointEngineManager):
    async def _update(self, version: int) -> WeightUpdate:
        update = await super()._update(version)
        self._fenced.clear()
        return msgspec.structs.replace(update, fenced={})


class AdvancesBeforeAcknowledgement(ParameterSynchronizer):
    """Takes what was sent for received: a replica that failed counts as one that has the version."""

    def __init__(self, config: Any, trainer: Any, rollouter: Any, mq: Any, **ports: Any) -> None:
        super().__init__(config, trainer, rollouter, mq, **ports)
        self._manager = _HastyManager(config, trainer, ports["replicas"], clock=ports["clock"], events=ports["events"])


class AdmitsBeforeTheFirstVersion(FullyAsyncRollouter):
    """Has replicas and budget before anybody confirmed a version."""

    def __init__(self, *arguments: Any, **ports: Any) -> None:
        super().__init__(*arguments, **ports)
        self._outstanding.open_window(-1)
        self._fleet.confirm({replica.replica_id: Version(1, 0).packed for replica in ports["replicas"]})


class KeepsItsPrefixCache(MarkerEngine):
    """Serves prompt blocks of old weights under new ones."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        kept = dict(self._prefix_cache)
        super().bind(tensors, version)
        self._prefix_cache.update(kept)
