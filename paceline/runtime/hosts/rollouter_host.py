"""The process of the rollouter: prompts, rewards, admission; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.commands import RolloutStatistics
from paceline.core.errors import QueueClosed, SyncError
from paceline.core.ports import VALIDATOR, ReplicaControl, RewardFn
from paceline.core.tasks import run_together
from paceline.rollout.prompts_ahead import PromptsAhead
from paceline.rollout.resumption import Resumption
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.runtime import registry, task_parts
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.resume import load_resumption
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import ThreadWork


class RollouterHost:
    """Holds the `FullyAsyncRollouter`."""

    def __init__(self, spec: RunSpec, role: str) -> None:
        self._process = HostProcess(spec, role)
        self._rollouter: FullyAsyncRollouter | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._opened: RewardFn | None = None

    async def start(self) -> None:
        """Build prompts and reward."""
        spec = self._process.spec
        self._tokenizer = registry.build_tokenizer(spec)
        run_dir = Path(spec.run_dir)
        renderer = task_parts.build_renderer(spec.config, self._tokenizer, Path(spec.model_path))
        prompts = await asyncio.to_thread(task_parts.build_prompts, spec.config, renderer, run_dir)
        self._reward = self._opened = await task_parts.build_reward(spec.config, run_dir / "reward.log")
        self._resumption: Resumption | None = None
        if spec.resumed is not None:
            checkpoint = Path(spec.resumed.checkpoint)
            self._resumption = load_resumption(spec.config, checkpoint, spec.journal_dir, spec.descent)
            task_parts.restore_prompts(prompts, self._resumption.snapshot.prompts)
        self._prompts = PromptsAhead(prompts, work=ThreadWork("prompts"), clock=self._process.clock)
        self._process.started()

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """Build the rollouter over the replicas and the queue."""
        spec = self._process.spec
        self._rollouter = FullyAsyncRollouter(
            spec.config,
            life=spec.life,
            prompts=self._prompts,
            replicas=[peers[replica_id] for replica_id in spec.replica_ids],
            queue=peers["message_queue"],
            reward=self._reward,
            decoder=self._tokenizer,
            stop_token_ids=self._tokenizer.eos_ids,
            clock=self._process.clock,
            events=self._process.events,
            resumption=self._resumption,
            trainer_side=peers.get(VALIDATOR),
        )

    async def run(self) -> None:
        """Roll out until stopped."""
        rollouter = self._connected()
        self._loop_task = asyncio.ensure_future(
            run_together(rollouter.fit(), self._prompts.run(rollouter.prompts_ready))
        )
        try:
            await self._loop_task
        except (asyncio.CancelledError, QueueClosed):
            return

    async def stop(self) -> None:
        """End the loop."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        if self._opened is not None:
            await task_parts.close_reward(self._opened)
        self._process.events.close()

    async def pause(self, deadline_wall: float | None = None) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().pause(deadline_wall)

    async def resume(self) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().resume()

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().update_param_version(version, validate, global_steps, use_trainer_do_validate)

    async def confirm_replicas(self, confirmed: Mapping[str, int], fenced: Mapping[str, str]) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().confirm_replicas(confirmed, fenced)

    async def add_replica(self, replica: ReplicaControl) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().add_replica(replica)

    async def remove_replica(self, replica_id: str) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().remove_replica(replica_id)

    async def next_loss(self, wait_seconds: float) -> tuple[str, str] | None:
        """See `FullyAsyncRollouter`."""
        return await self._connected().next_loss(wait_seconds)

    async def lose_replica(self, replica_id: str, reason: str) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().lose_replica(replica_id, reason)

    async def outstanding_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        """See `FullyAsyncRollouter`."""
        return await self._connected().outstanding_before(version, consumed)

    async def version_captured(self, version: int, trained: int) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().version_captured(version, trained)

    async def samples_dropped(self, sample_ids: Sequence[str]) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().samples_dropped(sample_ids)

    async def get_statistics(self) -> RolloutStatistics:
        """See `FullyAsyncRollouter`."""
        return await self._connected().get_statistics()

    async def snapshot(self) -> bytes:
        """See `FullyAsyncRollouter`."""
        return await self._connected().snapshot()

    async def save_checkpoint(self, local_global_step_folder: str) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().save_checkpoint(local_global_step_folder)

    async def wait_validations(self) -> None:
        """See `FullyAsyncRollouter`."""
        await self._connected().wait_validations()

    def _connected(self) -> FullyAsyncRollouter:
        if self._rollouter is None:
            raise SyncError("the rollouter is not connected yet")
        return self._rollouter
