"""A swap that is due while a step runs: made in the thread that decodes, settled on the loop whoever has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import pytest
import torch

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand, SwapReport
from paceline.core.errors import SyncError, WorkerDied
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.rollout.replica import Replica
from paceline.runtime.system import InlineWork, SystemClock, ThreadWork
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard, RecordingEvents
from paceline.testing.weight_memory import OwnedWeights

T = TypeVar("T")


class GatedEngine(MarkerEngine):
    """Notes what happens and in which thread; a step or a bind waits while its gate is closed."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self.memory = OwnedWeights()
        super().__init__(memory=self.memory)
        self.log = log
        self.steps, self.binds = threading.Event(), threading.Event()
        self.in_step, self.in_bind = threading.Event(), threading.Event()
        self.steps.set()
        self.binds.set()

    def step(self) -> list[Completion]:
        self.in_step.set()
        assert self.steps.wait(30)
        self.log.append(("step", threading.get_ident()))
        return super().step()

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.in_bind.set()
        assert self.binds.wait(30)
        self.log.append(("bind", threading.get_ident()))
        super().bind(tensors, version)


class LoggedWork(ThreadWork):
    """Notes where a job begins."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__("decode")
        self._log = log

    async def run(self, job: Callable[[], T]) -> T:
        self._log.append(("job", 0))
        return await super().run(job)


class Rig:
    """A replica that generates in a thread of its own, for ever."""

    def __init__(self) -> None:
        exchange = InProcessExchange()
        self.clock, self.backend, self.log = SystemClock(), MarkerBackend(), list[tuple[str, int]]()
        self.sender = InProcessSender(exchange, arenas=4, dtype=None, nonfinite="error")
        self.engine, self.board = GatedEngine(self.log), RecordingBoard()
        self.exchange = exchange
        self.replica = Replica(
            replica_id="replica-0",
            make_engine=lambda: self.engine,
            transaction=WeightTransaction(
                replica_id="replica-0",
                life=1,
                receiver=InProcessReceiver(exchange, holder="replica-0", verify="full"),
                board=self.board,
                clock=self.clock,
            ),
            partial_rollout=True,
            drain_seconds=60.0,
            decode_work=LoggedWork(self.log),
            stage_work=InlineWork(),
            clock=self.clock,
            events=RecordingEvents(),
        )

    async def begin(self) -> None:
        """Serve version 0 and generate."""
        await self.replica.swap(await self.staged(0))
        params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1 << 30, stop_token_ids=())
        request = GenerationRequest("r", [1], params)
        await self.replica.exchange(ExchangeRequest(requests=[request], acknowledged=0, wait_seconds=0.0))

    async def staged(self, n: int) -> SwapCommand:
        if n:
            self.backend.update(None)  # type: ignore[arg-type]
        manifest = publish(self.sender, self.backend.named_tensors(), Version(1, n).packed)
        deadline = self.clock.wall() + 60
        await self.replica.stage(StageCommand(manifest=manifest, sync_id=n, deadline_wall=deadline))
        return SwapCommand(version=manifest.version, sync_id=n, deadline_wall=deadline)

    async def stop_in_a_step(self) -> None:
        """The step that runs next does not end until `engine.steps` is set."""
        self.engine.steps.clear()
        self.engine.in_step.clear()
        assert await asyncio.to_thread(self.engine.in_step.wait, 30)

    async def held(self, n: int) -> asyncio.Task[Any]:
        """Version n is asked for while a step runs that does not end."""
        command = await self.staged(n)
        await self.stop_in_a_step()
        asked = asyncio.ensure_future(self.replica.swap(command))
        await asyncio.sleep(0.01)
        return asked

    def holders(self) -> int:
        """Leases of the replica."""
        return sum(len(arena.holders) for arena in self.exchange.arenas.values())


def with_rig(scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        rig = Rig()
        running = asyncio.ensure_future(rig.replica.run())
        async with asyncio.timeout(60):
            await rig.begin()
            await scenario(rig)
            await rig.replica.close()
            await running

    asyncio.run(main())


def test_the_swap_and_the_next_step_follow_without_another_thread() -> None:
    async def scenario(rig: Rig) -> None:
        asked = await rig.held(1)
        rig.log.clear()
        rig.engine.steps.set()
        report = await asked
        assert report.version == Version(1, 1).packed
        (step, thread), *rest = rig.log
        assert (step, rest[0], rest[1]) == ("step", ("bind", thread), ("step", thread))
        assert thread != threading.get_ident()
        assert rig.board.published[-1][0] == Version(1, 1).packed
        assert rig.holders() == 1  # the version before was given back

    with_rig(scenario)


def test_an_idle_replica_swaps_on_its_loop() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.exchange(ExchangeRequest(requests=[], acknowledged=0, wait_seconds=0.0, aborted=["r"]))
        command = await rig.staged(1)
        rig.log.clear()
        await rig.replica.swap(command)
        assert rig.log == [("bind", threading.get_ident())]
        assert rig.engine.marker == 1

    with_rig(scenario)


def test_a_refused_swap_is_the_callers_error_and_generation_goes_on_under_the_old_version() -> None:
    async def scenario(rig: Rig) -> None:
        asked = await rig.held(1)
        rig.engine.memory.fail_at = "weight"
        rig.engine.steps.set()
        with pytest.raises(SyncError, match="boom in weight"):
            await asked
        made = rig.engine.tokens_generated
        while rig.engine.tokens_generated < made + 3:
            await rig.clock.sleep(0.001)
        assert (rig.engine.version, rig.engine.marker) == (Version(1, 0).packed, 0)
        assert (await rig.replica.report()).state == "ready"
        await rig.replica.swap(await rig.staged(2))
        assert rig.engine.marker == 2

    with_rig(scenario)


def test_for_one_who_left_before_the_step_ended_nothing_is_swapped() -> None:
    async def scenario(rig: Rig) -> None:
        asked = await rig.held(1)
        asked.cancel()
        await asyncio.wait({asked})
        rig.engine.steps.set()
        made = rig.engine.tokens_generated
        while rig.engine.tokens_generated < made + 3:
            await rig.clock.sleep(0.001)
        assert rig.engine.version == Version(1, 0).packed

    with_rig(scenario)


def test_a_swap_under_way_when_its_caller_leaves_is_settled_whole() -> None:
    async def scenario(rig: Rig) -> None:
        asked = await rig.held(1)
        rig.engine.binds.clear()
        rig.engine.in_bind.clear()
        rig.engine.steps.set()
        assert await asyncio.to_thread(rig.engine.in_bind.wait, 30)
        asked.cancel()
        await asyncio.wait({asked})
        rig.engine.binds.set()
        while rig.board.published[-1][0] != Version(1, 1).packed or rig.holders() > 1:
            await rig.clock.sleep(0.001)
        report = await rig.replica.report()
        assert (report.state, report.version) == ("ready", Version(1, 1).packed)
        assert not await rig.replica.pin(Version(1, 0).packed)  # the session knows what it serves

    with_rig(scenario)


def test_no_step_runs_after_a_pause_that_was_asked_for_before_or_after_a_swap_was_due() -> None:
    async def scenario(rig: Rig) -> None:
        command = await rig.staged(1)
        await rig.stop_in_a_step()
        before = asyncio.ensure_future(rig.replica.pause())
        await asyncio.sleep(0)
        asked = asyncio.ensure_future(rig.replica.swap(command))
        await asyncio.sleep(0)
        after = asyncio.ensure_future(rig.replica.pause())
        await asyncio.sleep(0.01)
        rig.engine.steps.set()
        await asyncio.gather(before, asked, after)
        made = rig.engine.tokens_generated
        await asyncio.sleep(0.05)
        assert rig.engine.tokens_generated == made
        assert rig.engine.marker == 1
        await rig.replica.resume()
        while rig.engine.tokens_generated == made:
            await rig.clock.sleep(0.001)

    with_rig(scenario)


def test_a_swap_that_is_due_when_the_replica_closes_is_refused() -> None:
    async def scenario(rig: Rig) -> None:
        asked = await rig.held(1)
        await rig.replica.close()
        rig.engine.steps.set()
        # Made at the end of the step that ran, or refused with the reason: never left waiting.
        outcome = (await asyncio.gather(asked, return_exceptions=True))[0]
        assert isinstance(outcome, SwapReport | WorkerDied)

    with_rig(scenario)
