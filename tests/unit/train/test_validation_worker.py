"""The trainer's side of a validation: of exactly its version, and nothing is held after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.errors import DeadlineExceeded, LateCommand, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.sample import Completion, GenerationRequest, SamplingParams, TrainBatch
from paceline.core.version import Version
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.fault_injector import FaultInjector
from paceline.testing.marker_model import MarkerBackend, MarkerEngine, marker_of
from paceline.testing.recording import RecordingBoard, RecordingEvents
from paceline.testing.simulated_process import SimulatedProcess, SimulatedWork
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.validation_worker import ValidationWorker

STEP_SECONDS = 0.01


class Rig:
    """A trainer whose update n is version (1, n), and its side of validations."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.backend = MarkerBackend()
        self.trainer_is_silent = False
        exchange = self._exchange = InProcessExchange()
        self.sender = InProcessSender(exchange, arenas=2, dtype=None, nonfinite="error")
        self.manifests: dict[int, WeightManifest] = {}
        process = SimulatedProcess("validator", injector=FaultInjector([]), latency=lambda: 0.0, notice_seconds=0.0)
        self.worker = ValidationWorker(
            engine=MarkerEngine(places=2),
            make_transaction=lambda: WeightTransaction(
                replica_id="validator",
                life=1,
                receiver=InProcessReceiver(exchange, holder="validator", verify="full"),
                board=RecordingBoard(),
                clock=clock,
            ),
            snapshots=self,
            work=SimulatedWork(process, lambda: STEP_SECONDS),
            clock=clock,
            events=RecordingEvents(),
        )

    def holders(self) -> list[str]:
        """Who has leased which version."""
        return [f"{name} {arena.version}" for arena in self._exchange.arenas.values() for name in arena.holders]

    async def captured_manifest(self, version: int) -> WeightManifest:
        if self.trainer_is_silent:
            await asyncio.Event().wait()
        if version not in self.manifests:
            raise SyncError("the trainer no longer has it")
        return self.manifests[version]

    def publish(self) -> int:
        """Train one update and publish it."""
        self.backend.update(TrainBatch(sequences=[], temperature=1.0))
        n = int(dict(self.backend.named_tensors())["marker"][0])
        version = Version(1, n).packed
        self.sender.capture(self.backend.named_tensors(), version)
        self.manifests[version] = self.sender.publish().manifest
        return version

    async def validate(self, version: int, tokens: int = 3, seconds: float = 60.0) -> list[Completion]:
        params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=())
        requests = [
            GenerationRequest(f"validation:{i}", [1, 2, 3, 4], params, pinned_version=version) for i in range(5)
        ]
        return await self.worker.generate(version, requests, self.clock.wall() + seconds)


def with_rig(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        await scenario(Rig(clock))

    run_virtual(main)


def test_it_generates_under_its_version_whatever_is_trained_and_published_meanwhile() -> None:
    async def scenario(rig: Rig) -> None:
        first = rig.publish()
        validating = asyncio.ensure_future(rig.validate(first, tokens=20))
        await asyncio.sleep(5 * STEP_SECONDS)
        rig.publish()
        made = await validating
        assert sorted(one.request_id for one in made) == [f"validation:{i}" for i in range(5)]
        assert {marker_of(token) for one in made for token in one.token_ids} == {1}
        assert {version for one in made for version in one.versions} == {first}

    with_rig(scenario)


def test_nothing_is_leased_between_two_validations() -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(5):  # the sender has two arenas: one that is still leased would stop it
            version = rig.publish()
            assert rig.holders() == []
            made = await rig.validate(version)
            assert {marker_of(token) for one in made for token in one.token_ids} == {Version.unpack(version).n}

    with_rig(scenario)


def test_while_it_runs_its_version_is_leased_by_name() -> None:
    async def scenario(rig: Rig) -> None:
        version = rig.publish()
        validating = asyncio.ensure_future(rig.validate(version, tokens=20))
        await asyncio.sleep(5 * STEP_SECONDS)
        rig.publish()
        assert rig.holders() == [f"validator {version}"]
        await validating
        assert rig.holders() == []

    with_rig(scenario)


def test_what_comes_late_is_refused_and_what_takes_too_long_is_given_up() -> None:
    async def scenario(rig: Rig) -> None:
        version = rig.publish()
        with pytest.raises(LateCommand):
            await rig.validate(version, seconds=-1.0)
        with pytest.raises(DeadlineExceeded, match="has made 2 of 5 responses"):
            await rig.validate(version, tokens=3, seconds=6.5 * STEP_SECONDS)
        rig.publish()
        assert rig.holders() == []

    with_rig(scenario)


def test_a_snapshot_that_is_gone_is_an_error_and_the_next_validation_works() -> None:
    async def scenario(rig: Rig) -> None:
        gone = rig.publish()
        rig.publish()
        rig.publish()  # into the arena of the first
        with pytest.raises(SyncError):
            await rig.validate(gone)
        with pytest.raises(SyncError):
            await rig.validate(Version(1, 77).packed)
        assert len(await rig.validate(rig.publish())) == 5

    with_rig(scenario)


def test_a_trainer_that_does_not_answer_is_named_at_the_deadline() -> None:
    async def scenario(rig: Rig) -> None:
        version = rig.publish()
        rig.trainer_is_silent = True
        with pytest.raises(DeadlineExceeded, match="trainer did not answer") as caught:
            await rig.validate(version, seconds=5.0)
        assert caught.value.culprit == "trainer"
        rig.trainer_is_silent = False
        assert len(await rig.validate(version)) == 5

    with_rig(scenario)
