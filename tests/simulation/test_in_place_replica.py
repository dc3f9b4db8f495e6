"""A replica whose engine owns its memory, under deltas: each token tells which weights made it, whatever its label."""

from __future__ import annotations

import asyncio

import pytest
import torch

from paceline.core.errors import DigestMismatch
from paceline.core.version import Version
from paceline.testing.marker_model import MarkerEngine, marker_of
from paceline.testing.virtual_clock import VirtualClock
from paceline.testing.weight_memory import OwnedWeights
from tests.simulation.replica_rig import ReplicaRig, request, with_replicas

WIDTH = 2048


class PatchedEngine(MarkerEngine):
    """Counts changes in place; `break_next` leaves a wrong byte behind one."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, memory=OwnedWeights())
        self.patches = 0
        self.binds = 0
        self.break_next = False

    def bind(self, tensors: dict[str, torch.Tensor], version: int) -> None:  # type: ignore[override]
        self.binds += 1
        super().bind(tensors, version)

    def patched(self, version: int) -> None:
        super().patched(version)
        self.patches += 1
        if self.break_next:
            self.break_next = False
            self.served_tensors()["weight"].view(torch.uint8)[5] ^= 1


def rig_of(clock: VirtualClock, partial_rollout: bool = True, stage_seconds: float = 0.0) -> ReplicaRig:
    return ReplicaRig(
        clock,
        make_engine=PatchedEngine,
        delta="delta",
        width=WIDTH,
        partial_rollout=partial_rollout,
        stage_seconds=stage_seconds,
    )


def engine_of(rig: ReplicaRig, index: int = 0) -> PatchedEngine:
    engine = rig.engines[index]
    assert isinstance(engine, PatchedEngine)
    return engine


def test_a_sequence_in_flight_goes_on_under_weights_that_were_changed_in_place() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", [1, 2, 3, 4, 5]))
        for n, tokens in ((1, 4), (2, 8)):
            await rig.until_tokens(tokens)
            await rig.sync(n)
        (done,) = await rig.finish("a")
        assert (engine_of(rig).binds, engine_of(rig).patches) == (1, 2)
        assert [marker_of(token) for token in done.token_ids] == [Version.unpack(v).n for v in done.versions]
        assert {Version.unpack(version).n for version in done.versions} == {0, 1, 2}
        assert (await rig.replica.report()).state == "ready"

    with_replicas(scenario, rig_of)


def test_a_spare_engine_that_takes_over_is_copied_to() -> None:
    """The sequence in flight ends under its version, in the engine that holds it."""

    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", [1, 2, 3, 4, 5]))
        await rig.until_tokens(4)
        await rig.sync(1)
        (done,) = await rig.finish("a")
        assert {Version.unpack(version).n for version in done.versions} == {0}
        assert {marker_of(token) for token in done.token_ids} == {0}
        assert [(engine_of(rig, i).binds, engine_of(rig, i).patches) for i in range(2)] == [(1, 0), (1, 0)]
        await rig.sync(2)
        assert (engine_of(rig, 1).binds, engine_of(rig, 1).patches) == (1, 1)

    with_replicas(scenario, lambda clock: rig_of(clock, partial_rollout=False))


def test_a_wrong_byte_fences_the_replica_before_its_swap_is_reported() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(0)
        engine_of(rig).break_next = True
        with pytest.raises(DigestMismatch, match="does not serve the staged bytes of 1 tensors: weight"):
            await rig.sync(1)
        report = await rig.replica.report()
        assert (report.state, report.version) == ("fenced", Version(1, 0).packed)
        await rig.exchange(request("a", [1, 2, 3, 4, 5]))
        made = engine_of(rig).tokens_generated
        await rig.clock.sleep(5)
        assert engine_of(rig).tokens_generated == made  # no step under weights that nobody knows
        await rig.sync(2)
        assert engine_of(rig).binds == 2
        (done,) = await rig.finish("a")
        assert {marker_of(token) for token in done.token_ids} == {2}
        assert (await rig.replica.report()).state == "ready"

    with_replicas(scenario, rig_of)


PROOF_SECONDS = 0.5  # fifty decode steps


@pytest.mark.parametrize("is_right", [True, False])
def test_what_is_finished_before_the_proof_is_handed_out_after_it_or_never(is_right: bool) -> None:
    async def scenario(rig: ReplicaRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", [1, 2, 3, 4, 5], tokens=100))
        await rig.until_tokens(20)
        engine_of(rig).break_next = not is_right
        syncing = asyncio.ensure_future(rig.sync(1))
        while engine_of(rig).patches == 0:
            await rig.clock.sleep(0.01)
        await rig.clock.sleep(0.8 * PROOF_SECONDS)
        await rig.exchange()
        assert engine_of(rig).running == 0  # it is finished, under weights that are not proved
        assert rig.completions == {}
        await asyncio.wait({syncing})
        await rig.exchange()
        if is_right:
            assert {Version.unpack(v).n for v in rig.completions["a"].versions} == {0, 1}
            return
        assert isinstance(syncing.exception(), DigestMismatch)
        assert rig.completions == {}
        await rig.sync(2)
        await rig.exchange(request("a", [1, 2, 3, 4, 5], tokens=10))  # asked for again, it is taken again
        (done,) = await rig.finish("a")
        assert {marker_of(token) for token in done.token_ids} == {2}

    with_replicas(scenario, lambda clock: rig_of(clock, stage_seconds=PROOF_SECONDS))
