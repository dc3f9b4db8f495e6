"""Three served replicas under the real checkpoint engine manager, on virtual time: rolling syncs, deaths, catch-up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from paceline.core.commands import CaptureCommand, CaptureReport, ExchangeRequest, PublishCommand, PublishReport
from paceline.core.config import build_config
from paceline.core.errors import WorkerDied
from paceline.core.manifest import Published
from paceline.core.sample import Completion
from paceline.core.version import Version
from paceline.rollout.served_replica import ServedReplica
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from paceline.testing.fake_server import FakeServer, read_label
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.rollout.served_rig import LIFE, makers, manifest_of, numbers, request

REPLICAS = 3


class Trainer:
    """Publishes a manifest per version."""

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        manifest = manifest_of(Version.unpack(command.version).n)
        return CaptureReport(version=manifest.version, digest=manifest.digest, bytes=8, seconds=0.0, wait_seconds=0.0)

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        return PublishReport(published=Published(manifest_of(Version.unpack(command.version).n)), seconds=0.0)


class Fleet:
    """Replicas over fake servers, the manager over them, and a client for each."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.events = RecordingEvents()
        kinds = itertools.cycle(("kept", "kept", "closed"))
        self.servers = [FakeServer(clock, streams=kind) for kind in itertools.islice(kinds, REPLICAS)]  # type: ignore[arg-type]
        self.replicas = [self.replica(index) for index in range(REPLICAS)]
        config = build_config({"checkpoint_engine": {"update_order": "rolling"}})
        self.manager = CheckpointEngineManager(config, Trainer(), self.replicas, clock=clock, events=self.events)
        self.done: list[Completion] = []
        self.stopping = False

    def replica(self, index: int) -> ServedReplica:
        return ServedReplica(
            replica_id=f"replica-{index}",
            life=LIFE,
            server=self.servers[index],
            read_label=read_label,
            partial_rollout=True,
            drain_seconds=5.0,
            clock=self.clock,
            events=self.events,
        )

    async def sync(self, n: int) -> list[str]:
        update = await self.manager.update_weights(0, version=Version(LIFE, n).packed)
        return sorted(update.swapped)

    async def ask(self, replica: ServedReplica) -> None:
        owed: set[str] = set()
        numbers_of = itertools.count()
        acknowledged = 0
        while owed or not self.stopping:
            fresh = []
            while len(owed) < 4 and not self.stopping:
                fresh.append(request(f"{replica.replica_id}:{next(numbers_of)}", tokens=50))
                owed.add(fresh[-1].request_id)
            reply = await replica.exchange(ExchangeRequest(fresh, acknowledged, wait_seconds=0.05))
            acknowledged = reply.batch
            self.done += [done for done in reply.completions if done.request_id in owed]
            owed -= {done.request_id for done in reply.completions}


def with_fleet(scenario: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        fleet = Fleet(clock)
        running = [asyncio.ensure_future(replica.run()) for replica in fleet.replicas]
        async with asyncio.timeout(1000):
            await scenario(fleet)
        for replica in fleet.replicas:
            await replica.close()
        await asyncio.gather(*running, return_exceptions=True)

    run_virtual(main)


def test_a_rolling_sync_keeps_two_of_three_generating_and_fails_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.sync(0)
        asking = [asyncio.ensure_future(fleet.ask(replica)) for replica in fleet.replicas]
        swapping: list[int] = []

        async def watch() -> None:
            while True:
                swapping.append(sum(replica.swapping for replica in fleet.replicas))
                await fleet.clock.sleep(0.001)

        watching = asyncio.ensure_future(watch())
        for n in range(1, 21):
            assert len(await fleet.sync(n)) == REPLICAS
            await fleet.clock.sleep(0.1)
        fleet.stopping = True
        await asyncio.gather(*asking)
        watching.cancel()
        assert max(swapping) == 1
        assert len(fleet.done) > 60
        for done in fleet.done:
            assert done.finish_reason == "length"
            assert numbers(done) == makers(done)

    with_fleet(scenario)


def test_a_server_that_dies_delays_nobody_and_comes_back_by_a_full_version() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.sync(0)
        fleet.servers[1].dead = True
        assert await fleet.sync(1) == ["replica-0", "replica-2"]
        with pytest.raises(WorkerDied):
            await fleet.replicas[1].exchange(ExchangeRequest([], 0, wait_seconds=0.0))
        fleet.servers[1].dead = False
        fleet.servers[1].restart()
        fleet.replicas[1] = fleet.replica(1)
        running = asyncio.ensure_future(fleet.replicas[1].run())
        fleet.manager.remove_replicas(["replica-1"])
        fleet.manager.add_replicas([fleet.replicas[1]])
        assert await fleet.manager.catch_up("replica-1") == Version(LIFE, 1).packed
        assert len(await fleet.sync(2)) == REPLICAS
        await fleet.replicas[1].close()
        await running

    with_fleet(scenario)
