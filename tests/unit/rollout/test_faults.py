"""The rollout side when things break: pauses, pins, refusals, drains, the end of a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from paceline.core.config import build_config
from paceline.core.errors import ConfigError, LateCommand, SyncError, WorkerDied
from paceline.core.events import PromptRefused, ReplicaChanged, ValidationSkipped
from paceline.core.sample import Completion, GenerationRequest, Prompt
from paceline.core.version import Version
from paceline.rollout.usable_prompts import UsablePrompts
from paceline.testing.marker_model import MarkerEngine
from paceline.testing.marker_task import EndlessPrompts
from paceline.testing.recording import CallLog, RecordingEvents
from tests.simulation.replica_rig import ReplicaRig, request, with_replicas
from tests.unit.rollout.test_rollouter import EchoReplica, Rig, with_rig

PROMPT = [1, 2, 3, 4]


class DeafReplica(EchoReplica):
    """Answers to nothing but exchanges."""

    async def pause(self) -> None:
        await asyncio.Event().wait()

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        self.log.add(self.replica_id, "pin", deadline=deadline_wall)
        await asyncio.Event().wait()
        return True


# -- the pause barrier -----------------------------------------------------------------------------------------------


def test_a_replica_that_does_not_pause_is_lost_and_the_pause_returns() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.rollouter.add_replica(DeafReplica(rig.clock, "replica-2"))
        began = rig.clock.now()
        await rig.rollouter.pause()
        assert rig.clock.now() - began < 61
        assert [e.replica for e in rig.events.of(ReplicaChanged) if e.state == "lost"] == ["replica-2"]

    with_rig(scenario)


def test_a_pause_that_comes_late_pauses_nobody() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].log = CallLog()
        with pytest.raises(LateCommand):
            await rig.rollouter.pause(rig.clock.wall() - 1)
        assert rig.replicas[0].log.names() == []

    with_rig(scenario)


def test_whatever_happens_while_paused_they_go_on() -> None:
    async def scenario(rig: Rig) -> None:
        log = rig.replicas[0].log = CallLog()
        with pytest.raises(SyncError, match="inside"):
            async with rig.rollouter.paused():
                raise SyncError("inside")
        assert log.names() == ["replica-0.pause", "replica-0.resume"]

    with_rig(scenario)


def test_who_joins_during_a_pause_is_paused_too() -> None:
    async def scenario(rig: Rig) -> None:
        fresh = EchoReplica(rig.clock, "replica-2")
        async with rig.rollouter.paused():
            await rig.rollouter.add_replica(fresh)
            assert fresh.log.names() == ["replica-2.pause"]
        assert fresh.log.names() == ["replica-2.pause", "replica-2.resume"]

    with_rig(scenario)


# -- validation ------------------------------------------------------------------------------------------------------


def test_a_replica_that_does_not_pin_does_not_hold_up_the_publication() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[:] = [DeafReplica(rig.clock, "replica-0"), DeafReplica(rig.clock, "replica-1")]
        for replica in rig.replicas:
            await rig.rollouter.add_replica(replica)
        began = rig.clock.now()
        await rig.publish(0, validate=True)
        assert rig.clock.now() - began <= 30  # half of a sync's deadline
        assert [(e.version, e.reason) for e in rig.events.of(ValidationSkipped)] == [
            (0, "no replica serves this version")
        ]
        await asyncio.sleep(1)
        assert rig.replicas[0].log.names() == ["replica-0.pin", "replica-0.unpin"]

    with_rig(scenario)


def test_a_late_pin_is_refused() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(1)
        with pytest.raises(LateCommand):
            await rig.replica.pin(Version(1, 1).packed, rig.clock.wall() - 1)
        assert await rig.replica.pin(Version(1, 1).packed, rig.clock.wall() + 1)

    with_replicas(scenario, ReplicaRig)


# -- a replica's loop ------------------------------------------------------------------------------------------------


class Breaks(MarkerEngine):
    """Its fifth step fails with an error of its library."""

    steps = 0

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("out of memory")
        return super().step()


def test_an_engine_that_breaks_fails_the_commands_that_wait() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(1)
        await rig.exchange(request("a", PROMPT, tokens=50))
        await rig.until_tokens(5)
        with pytest.raises(WorkerDied, match="closing"):
            await rig.sync(2)
        with pytest.raises(WorkerDied, match="closing"):
            await rig.exchange()
        assert list(rig.sender.blocking_holders()) == []

    with pytest.raises(RuntimeError, match="out of memory"):
        with_replicas(scenario, lambda clock: ReplicaRig(clock, make_engine=Breaks))


class Picky(MarkerEngine):
    """Refuses requests of more than 20 tokens."""

    def add(self, requests: list[GenerationRequest]) -> None:  # type: ignore[override]
        if any(one.params.max_tokens > 20 for one in requests):
            raise ConfigError("more than 20 tokens")
        super().add(requests)


def test_a_request_that_the_engine_refuses_comes_back_alone() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(1)
        await rig.exchange(request("a", PROMPT), request("b", PROMPT, tokens=21), request("c", PROMPT))
        a, b, c = await rig.finish("a", "b", "c")
        assert (a.finish_reason, c.finish_reason) == ("length", "length")
        assert (b.finish_reason, b.error, b.token_ids) == ("error", "more than 20 tokens", [])

    with_replicas(scenario, lambda clock: ReplicaRig(clock, make_engine=Picky))


class Unproven(MarkerEngine):
    """Can bind nothing any more after its first version."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        if self.version is not None:
            raise SyncError("broken")
        super().bind(tensors, version)


def test_a_fenced_replica_makes_no_step() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(1)
        await rig.exchange(request("a", PROMPT, tokens=100))
        await rig.until_tokens(3)
        with pytest.raises(SyncError):
            await rig.sync(2)
        made = rig.engines[0].tokens_generated
        await rig.clock.sleep(5)
        assert rig.engines[0].tokens_generated == made

    with_replicas(scenario, lambda clock: ReplicaRig(clock, make_engine=Unproven))


# -- prompts ---------------------------------------------------------------------------------------------------------


class AllLong(EndlessPrompts):
    """No prompt is short."""

    def next_prompt(self) -> Prompt:
        return Prompt("p", "?", tuple(range(9)), "", "t")


def test_a_source_without_a_usable_prompt_is_refused() -> None:
    events = RecordingEvents()
    with pytest.raises(ConfigError, match="prompts in a row are longer"):
        UsablePrompts(AllLong(), longest=8, events=events).next_prompt()
    assert events.of(PromptRefused)[0].tokens == 9


def test_room_for_a_response_is_needed() -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        build_config({"rollout": {"max_model_len": 16}, "data": {"max_prompt_length": 16}})
