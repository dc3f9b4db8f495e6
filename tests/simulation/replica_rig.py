"""One replica with its trainer's side, driven step by step on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand, SwapReport
from paceline.core.sample import Completion, GenerationRequest, SamplingParams, TrainBatch
from paceline.core.version import Version
from paceline.rollout.replica import Replica
from paceline.runtime.system import InlineWork
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.fault_injector import FaultInjector
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard, RecordingEvents
from paceline.testing.simulated_process import SimulatedProcess, SimulatedWork
from paceline.testing.virtual_clock import VirtualClock, run_virtual

STEP_SECONDS = 0.01


class ReplicaRig:
    """`engine` is the replica's live engine unless a draining session took its place."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        make_engine: Callable[[], MarkerEngine] = MarkerEngine,
        partial_rollout: bool = True,
        drain_seconds: float = 60.0,
        delta: Literal["full", "delta"] = "full",
        width: int = 8,
        stage_seconds: float = 0.0,
    ) -> None:
        self.clock = clock
        self.events = RecordingEvents()
        self.backend = MarkerBackend(width)
        self._confirmed: int | None = None
        self.engines: list[MarkerEngine] = []
        self._make = make_engine
        exchange = InProcessExchange()
        self.sender = InProcessSender(exchange, arenas=4, dtype=None, nonfinite="error", delta=delta)
        process = SimulatedProcess("replica-0", injector=FaultInjector([]), latency=lambda: 0.0, notice_seconds=0.0)
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
            decode_work=SimulatedWork(process, lambda: STEP_SECONDS),
            stage_work=SimulatedWork(process, lambda: stage_seconds) if stage_seconds else InlineWork(),
            clock=clock,
            events=self.events,
        )
        self._received = 0
        self.completions: dict[str, Completion] = {}

    def _make_engine(self) -> MarkerEngine:
        self.engines.append(self._make())
        return self.engines[-1]

    async def sync(self, n: int) -> SwapReport:
        """Publish marker n as version (1, n), against the version that was confirmed last."""
        while int(dict(self.backend.named_tensors())["marker"][0]) < n:
            self.backend.update(TrainBatch(sequences=[], temperature=1.0))
        manifest = publish(self.sender, self.backend.named_tensors(), Version(1, n).packed, self._confirmed)
        deadline = self.clock.wall() + 60
        await self.replica.stage(StageCommand(manifest=manifest, sync_id=n, deadline_wall=deadline))
        report = await self.replica.swap(SwapCommand(version=manifest.version, sync_id=n, deadline_wall=deadline))
        self._confirmed = manifest.version
        return report

    async def until_tokens(self, count: int) -> None:
        """Return within the step that makes the token before; a command given now falls behind token `count`."""
        while sum(engine.tokens_generated for engine in self.engines) < count - 1:
            await self.clock.sleep(STEP_SECONDS / 6.3)  # never at the end of a step

    async def exchange(self, *requests: GenerationRequest, wait_seconds: float = 0.0) -> None:
        """Send requests, take in completions."""
        reply = await self.replica.exchange(
            ExchangeRequest(requests=list(requests), acknowledged=self._received, wait_seconds=wait_seconds)
        )
        self._received = reply.batch
        self.completions.update({completion.request_id: completion for completion in reply.completions})

    async def finish(self, *request_ids: str) -> list[Completion]:
        """Wait for these."""
        while not set(request_ids) <= self.completions.keys():
            await self.exchange(wait_seconds=1.0)
        return [self.completions[request_id] for request_id in request_ids]


def request(request_id: str, prompt: list[int], tokens: int = 12) -> GenerationRequest:
    """A request for so many tokens."""
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=())
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, params=params)


def with_replicas(scenario: Callable[..., Awaitable[None]], *makers: Callable[[VirtualClock], ReplicaRig]) -> None:
    """Run a scenario with one rig per maker."""

    async def main(clock: VirtualClock) -> None:
        rigs = [make(clock) for make in makers]
        running = [asyncio.ensure_future(rig.replica.run()) for rig in rigs]
        async with asyncio.timeout(1000):
            await scenario(*rigs)
        for rig in rigs:
            await rig.replica.close()
        await asyncio.gather(*running)

    run_virtual(main)
