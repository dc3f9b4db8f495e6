"""A rolling sync of three replicas: no request fails, and at every moment at least two generate."""

from __future__ import annotations

import asyncio

from paceline.core.commands import CaptureCommand, CaptureReport, PublishCommand, PublishReport
from paceline.core.config import build_config
from paceline.core.manifest import Published
from paceline.core.version import Version
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from tests.vllm.fleet import LIFE, PATIENCE_SECONDS, Client, Fleet

SYNCS = 3


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
    manager = CheckpointEngineManager(config, Trainer(fleet), fleet.replicas, clock=fleet.clock, events=fleet.events)
    clients = [Client(replica, at_once=4, tokens=40) for replica in fleet.replicas]
    updating: list[int] = []

    async def watch() -> None:
        while True:
            updating.append(sum(replica.swapping for replica in fleet.replicas))
            await asyncio.sleep(0.002)

    async def roll() -> None:
        asking = [asyncio.ensure_future(client.run()) for client in clients]
        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0.5)
        for _ in range(SYNCS):
            version = Version(LIFE, fleet.newest + 1).packed
            update = await manager.update_weights(0, version=version)
            assert len(update.swapped) == 3
            assert update.verified
        for client in clients:
            client.stopping = True
        await asyncio.gather(*asking)
        watching.cancel()

    fleet.run(roll())
    assert updating.count(1) > 10, "the watch has seen swaps"
    assert max(updating) == 1
    for client in clients:
        assert client.done
        assert {completion.finish_reason for completion in client.done.values()} == {"length"}
