"""The decode loop: pause is a barrier, swaps fall between two steps, sessions keep their version (cases C13, C15)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand, SwapReport
from paceline.core.errors import SyncError, WorkerDied
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.rollout.replica import Replica
from paceline.runtime.system import InlineWork
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.marker_model import MarkerBackend, MarkerEngine, marker_of
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard, RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual

STEP_SECONDS = 0.01


class TimedWork(InlineWork):
    """A decode step takes virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.steps = 0

    async def run(self, job):  # type: ignore[no-untyped-def]
        await self._clock.sleep(STEP_SECONDS)
        self.steps += 1
        return job()


class Rig:
    """A replica with its trainer's side."""

    def __init__(self, clock: VirtualClock, partial_rollout: bool, drain_seconds: float = 60.0) -> None:
        self.clock = clock
        self.backend = MarkerBackend()
        exchange = InProcessExchange()
        self.sender = InProcessSender(exchange, arenas=4, dtype=None, nonfinite="error")
        self.work = TimedWork(clock)
        self.engines: list[MarkerEngine] = []
        self.events = RecordingEvents()
        self.replica = Replica(
            replica_id="replica-0",
            make_engine=self._make_engine,
            transaction=WeightTransaction(
                replica_id="replica-0",
                life=1,
                receiver=InProcessReceiver(exchange, holder="replica-0", verify="full"),
                board=RecordingBoard(),
                clock=clock,
            ),
            partial_rollout=partial_rollout,
            drain_seconds=drain_seconds,
            decode_work=self.work,
            stage_work=InlineWork(),
            clock=clock,
            events=self.events,
        )
        self._received = 0
        self.completions: dict[str, Completion] = {}

    def _make_engine(self) -> MarkerEngine:
        self.engines.append(MarkerEngine())
        return self.engines[-1]

    async def sync(self, n: int) -> SwapReport:
        """Publish marker n as version (1, n)."""
        while self.backend.named_tensors()[0][1].item() < n:  # type: ignore[index]
            self.backend.update(None)  # type: ignore[arg-type]
        manifest = publish(self.sender, self.backend.named_tensors(), Version(1, n).packed)
        deadline = self.clock.wall() + 60
        await self.replica.stage(StageCommand(manifest=manifest, sync_id=n, deadline_wall=deadline))
        return await self.replica.swap(SwapCommand(version=manifest.version, sync_id=n, deadline_wall=deadline))

    async def send(self, *requests: GenerationRequest) -> None:
        await self.exchange(list(requests), 0.0)

    async def abort(self, *request_ids: str) -> None:
        await self.replica.exchange(
            ExchangeRequest(requests=[], acknowledged=self._received, wait_seconds=0.0, aborted=list(request_ids))
        )

    async def exchange(self, requests: list[GenerationRequest], wait_seconds: float) -> None:
        reply = await self.replica.exchange(
            ExchangeRequest(requests=requests, acknowledged=self._received, wait_seconds=wait_seconds)
        )
        self._received = reply.batch
        self.completions.update({completion.request_id: completion for completion in reply.completions})

    async def finish(self, *request_ids: str) -> list[Completion]:
        while not set(request_ids) <= self.completions.keys():
            await self.exchange([], 1.0)
        return [self.completions[request_id] for request_id in request_ids]


def request(request_id: str, tokens: int = 12, pinned: int | None = None) -> GenerationRequest:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=())
    return GenerationRequest(request_id=request_id, prompt_ids=[1, 2, 3, 4], params=params, pinned_version=pinned)


def with_rig(scenario: Callable[[Rig], Awaitable[None]], partial_rollout: bool = True) -> None:
    async def main(clock: VirtualClock) -> None:
        rig = Rig(clock, partial_rollout)
        running = asyncio.ensure_future(rig.replica.run())
        async with asyncio.timeout(1000):
            await scenario(rig)
        await rig.replica.close()
        await running

    run_virtual(main)


def test_no_traffic_before_the_first_confirmed_version() -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(SyncError, match="no confirmed version"):
            await rig.send(request("a"))
        await rig.sync(0)
        await rig.send(request("a"))
        (done,) = await rig.finish("a")
        assert {marker_of(token) for token in done.token_ids} == {0}

    with_rig(scenario)


def test_a_sample_over_three_versions_has_true_labels() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(2)
        await rig.send(request("a"))
        await rig.clock.sleep(2.5 * STEP_SECONDS)
        await rig.sync(4)
        await rig.clock.sleep(2.5 * STEP_SECONDS)
        await rig.sync(6)
        (done,) = await rig.finish("a")
        assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 12
        for position, (token, version) in enumerate(zip(done.token_ids, done.versions, strict=True)):
            n = Version.unpack(version).n
            assert token == 1000 * n + position
            assert done.logprobs[position] == -(n + position / 1000)
        assert {Version.unpack(version).n for version in done.versions} == {2, 4, 6}

    with_rig(scenario)


def test_without_partial_rollout_a_sequence_keeps_its_version() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(2)
        await rig.send(request("old"))
        await rig.clock.sleep(3 * STEP_SECONDS)
        await rig.sync(4)
        await rig.send(request("new"))
        old, new = await rig.finish("old", "new")
        assert {marker_of(token) for token in old.token_ids} == {2}
        assert {Version.unpack(version).n for version in old.versions} == {2}
        assert {marker_of(token) for token in new.token_ids} == {4}
        assert list(rig.sender.blocking_holders()) == []

    with_rig(scenario, partial_rollout=False)


def test_pause_is_a_barrier_and_idempotent() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.send(request("a", tokens=50))
        await rig.clock.sleep(5 * STEP_SECONDS)
        await rig.replica.pause()
        await rig.replica.pause()
        frozen = rig.work.steps
        await rig.clock.sleep(100 * STEP_SECONDS)
        assert rig.work.steps == frozen
        report = await rig.sync(1)
        assert report.version == Version(1, 1).packed
        assert rig.work.steps == frozen
        await rig.replica.resume()
        await rig.replica.resume()
        (done,) = await rig.finish("a")
        assert len(done.token_ids) == 50
        assert {marker_of(token) for token in done.token_ids} == {0, 1}

    with_rig(scenario)


def test_a_pause_takes_a_step_at_most_whatever_the_longest_generation_does() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.send(request("a", tokens=100_000))
        for part in range(1, 8):
            await rig.clock.sleep(3 * STEP_SECONDS + part * STEP_SECONDS / 8)  # anywhere within a step
            began = rig.clock.now()
            await rig.replica.pause()
            assert rig.clock.now() - began <= STEP_SECONDS
            await rig.replica.resume()

    with_rig(scenario)


def test_the_pause_of_a_swap_is_not_the_time_of_staging() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.send(request("a", tokens=50))
        await rig.clock.sleep(5 * STEP_SECONDS)
        report = await rig.sync(1)
        assert report.pause_seconds < STEP_SECONDS

    with_rig(scenario)


def test_a_pinned_session_serves_its_version_through_later_syncs() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        pinned = Version(1, 0).packed
        assert await rig.replica.pin(pinned)
        assert await rig.replica.pin(pinned)
        await rig.sync(1)
        await rig.sync(2)
        await rig.send(request("live"), request("pinned", pinned=pinned))
        live, held = await rig.finish("live", "pinned")
        assert {marker_of(token) for token in live.token_ids} == {2}
        assert {marker_of(token) for token in held.token_ids} == {0}
        assert not await rig.replica.pin(Version(1, 1).packed)
        await rig.replica.unpin(pinned)
        await rig.replica.unpin(pinned)
        with pytest.raises(SyncError, match="not pinned"):
            await rig.send(request("late", pinned=pinned))

    with_rig(scenario)


def test_a_request_is_not_taken_twice_and_a_lost_reply_loses_nothing() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.send(request("a"), request("a"))
        await rig.send(request("a"))
        await rig.clock.sleep(30 * STEP_SECONDS)
        lost = await rig.replica.exchange(ExchangeRequest(requests=[], acknowledged=0, wait_seconds=0.1))
        again = await rig.replica.exchange(ExchangeRequest(requests=[], acknowledged=0, wait_seconds=0.1))
        assert [c.request_id for c in lost.completions] == [c.request_id for c in again.completions] == ["a"]
        after = await rig.replica.exchange(ExchangeRequest(requests=[], acknowledged=again.batch, wait_seconds=0.1))
        assert after.completions == []

    with_rig(scenario)


def test_commands_to_a_closing_replica_fail_instead_of_waiting() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.replica.close()
        with pytest.raises(WorkerDied, match="closing"):
            await rig.replica.pause()

    with_rig(scenario)


def test_new_prompts_never_meet_an_old_prefix_cache() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(1)
        await rig.send(request("before"))
        await rig.finish("before")
        await rig.sync(2)
        await rig.send(request("after"))
        await rig.finish("after")
        assert rig.engines[0].prefill_markers == {"before": {1}, "after": {2}}

    with_rig(scenario)
