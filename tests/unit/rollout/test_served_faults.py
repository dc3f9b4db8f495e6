"""A server that dies, hangs, is started again or swapped under our feet: named, and nothing of it is believed."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from paceline.core.errors import PacelineError, SyncError, WorkerDied
from tests.unit.rollout.served_rig import ServedRig, request, with_rig

BOTH = pytest.mark.parametrize("streams", ["kept", "closed"])
Streams = Literal["kept", "closed"]


@BOTH
def test_a_dead_server_ends_the_replica_with_its_name(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", tokens=1000))
        await rig.clock.sleep(0.1)
        rig.server.dead = True
        await rig.clock.sleep(2.0)
        with pytest.raises(WorkerDied, match="went away"):
            await rig.exchange(request("b"))

    rig = with_rig(scenario, streams=streams)
    assert isinstance(rig.ended, WorkerDied)
    assert rig.ended.worker == "replica-0"
    assert rig.completions == {}
    assert rig.server.ended


@BOTH
def test_a_server_that_dies_in_a_swap_ends_the_replica(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", tokens=1000))
        await rig.stage(1)
        swapping = asyncio.ensure_future(rig.swap(1))
        await rig.clock.sleep(0.02)
        rig.server.dead = True
        with pytest.raises(PacelineError):
            await swapping
        assert (await rig.replica.report()).state == "fenced"

    assert isinstance(with_rig(scenario, streams=streams).ended, WorkerDied)


@BOTH
def test_tokens_of_a_server_that_was_started_again_are_never_handed_on(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(*(request(str(index), tokens=40 + 40 * index) for index in range(8)))
        await rig.clock.sleep(0.2)
        rig.server.restart()
        with pytest.raises(PacelineError):
            await rig.finish("0")  # before anybody looks what the server says it serves

    rig = with_rig(scenario, streams=streams)
    assert isinstance(rig.ended, WorkerDied)
    assert "started again or somebody else loads weights" in rig.ended.message
    assert rig.completions == {}


def test_a_server_that_does_not_tell_which_weights_made_a_token_is_not_believed() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        rig.server.tells_spans = False
        await rig.exchange(request("a"))
        await rig.clock.sleep(1.0)

    rig = with_rig(scenario)
    assert rig.ended is not None
    assert "does not tell which weights" in rig.ended.message
    assert rig.completions == {}


def test_weights_that_somebody_else_loaded_are_found_at_the_next_look() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        rig.server.label = "7.7"
        await rig.clock.sleep(3.0)

    rig = with_rig(scenario)
    assert isinstance(rig.ended, WorkerDied)
    assert "version 7.7" in rig.ended.message


def test_a_request_that_the_server_refuses_fails_alone() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        generate = rig.server.generate

        async def refusing(asked):  # type: ignore[no-untyped-def]
            if asked.request_id == "bad":
                from paceline.core.errors import ConfigError

                raise ConfigError("too long for this server")
            async for batch in generate(asked):
                yield batch

        rig.server.generate = refusing  # type: ignore[method-assign]
        await rig.exchange(request("bad"), request("good"))
        bad, good = await rig.finish("bad", "good")
        assert (bad.finish_reason, bad.error) == ("error", "too long for this server")
        assert good.finish_reason == "length"

    with_rig(scenario)


def test_discarded_versions_are_let_go_on_the_server() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.stage(1)
        held = set(rig.server.held)
        await rig.replica.discard_staged(max(held))
        assert rig.server.held == held - {max(held)}
        with pytest.raises(SyncError, match="not staged"):
            await rig.swap(1)

    with_rig(scenario)
