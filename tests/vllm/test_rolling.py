"""A rolling sync of three replicas: no request fails, and at every moment at least two generate."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    PublishCommand,
    PublishReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.config import build_config
from paceline.core.manifest import Published
from paceline.core.version import Version
from paceline.rollout.served_replica import ServedReplica
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from tests.vllm.fleet import LIFE, PATIENCE_SECONDS, Client, Fleet

SYNCS = 3


class Watched:
    """A replica that counts how many are being swapped at a time."""

    def __init__(self, replica: ServedReplica, swapping: list[int]) -> None:
        self._replica = replica
        self._swapping = swapping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def swap(self, command: SwapCommand) -> SwapReport:
        """One more, from the first step to the last."""
        self._swapping.append(self._swapping[-1] + 1)
        try:
            return await self._replica.swap(command)
        finally:
            self._swapping.append(self._swapping[-1] - 1)


class Trainer:
    """Publishes the fleet's weights."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        self._manifest = self._fleet.publish(self._fleet.changed_weights(0.05))
        manifest = self._manifest
        return CaptureReport(
            version=manifest.version,
            digest=manifest.digest,
            bytes=manifest.total_bytes,
            seconds=0.0,
            wait_seconds=0.0,
        )

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        return PublishReport(published=Published(self._manifest), seconds=0.0)


def test_two_of_three_generate_at_every_moment(fleet: Fleet) -> None:
    settings = {"update_order": "rolling", "rolling_size": 1, "sync_timeout_seconds": PATIENCE_SECONDS}
    config = build_config({"checkpoint_engine": settings})
    updating = [0]
    replicas: list[Any] = [Watched(replica, updating) for replica in fleet.replicas]
    manager = CheckpointEngineManager(config, Trainer(fleet), replicas, clock=fleet.clock, events=fleet.events)
    clients = [Client(replica, at_once=4, tokens=40) for replica in fleet.replicas]

    async def roll() -> None:
        asking = [asyncio.ensure_future(client.run()) for client in clients]
        await asyncio.gather(*(client.more(1) for client in clients))
        for _ in range(SYNCS):
            version = Version(LIFE, fleet.newest + 1).packed
            update = await manager.update_weights(0, version=version)
            assert len(update.swapped) == 3
            assert update.verified
        for client in clients:
            client.stopping = True
        await asyncio.gather(*asking)

    fleet.run(roll())
    assert updating == [0, *[1, 0] * 3 * SYNCS]
    for client in clients:
        assert client.done
        assert {completion.finish_reason for completion in client.done.values()} == {"length"}
