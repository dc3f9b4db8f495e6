"""The stock server is killed in the middle of an update and started again: named, met again, verified weights."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.commands import StageCommand, SwapCommand
from paceline.core.errors import PacelineError, WorkerDied
from tests.vllm.fleet import PATIENCE_SECONDS, Client, Fleet


def test_a_killed_server_comes_back_with_verified_weights(fleet: Fleet) -> None:
    async def scenario() -> None:
        manifest = fleet.publish(fleet.changed_weights(0.05))
        deadline = fleet.clock.wall() + PATIENCE_SECONDS
        for replica in fleet.replicas:
            await replica.stage(StageCommand(manifest=manifest, sync_id=1, deadline_wall=deadline))
        command = SwapCommand(version=manifest.version, sync_id=1, deadline_wall=deadline)
        swaps = [asyncio.ensure_future(replica.swap(command)) for replica in fleet.replicas]
        fleet.server.kill()
        with pytest.raises(PacelineError):
            await swaps[2]
        await asyncio.gather(*swaps[:2])
        with pytest.raises(WorkerDied, match="went away"):
            await fleet.loops[2]

        fleet.server.start()
        await fleet.meet_server_again()
        assert await fleet.ports[2].weight_version() is None
        own = await fleet.ports[2].checksums()
        report = await fleet.bring(fleet.replicas[2], manifest)
        assert report.digest == manifest.digest
        served = await fleet.ports[2].checksums()
        assert served == await fleet.ports[1].checksums()
        assert served != own
        client = Client(fleet.replicas[2], at_once=2, tokens=8)
        client.stopping = False
        asking = asyncio.ensure_future(client.run())
        await client.more(2)
        client.stopping = True
        await asking
        assert {version for done in client.done.values() for version in done.versions} == {manifest.version}

    fleet.run(scenario())
