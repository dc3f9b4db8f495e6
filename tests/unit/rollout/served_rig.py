"""A served replica over a fake server on virtual time, and a client that keeps asking."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand, SwapReport
from paceline.core.errors import PacelineError
from paceline.core.manifest import WeightManifest
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.rollout.served_replica import ServedReplica
from paceline.testing.fake_server import FakeServer, read_label
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual

LIFE = 1


def manifest_of(n: int) -> WeightManifest:
    return WeightManifest(
        version=Version(LIFE, n).packed,
        tensors=(),
        aliases={},
        total_bytes=8,
        digest=f"{n:032x}",
        arena_id="arena",
        address="",
    )


def request(request_id: str, tokens: int = 12, pinned: int | None = None) -> GenerationRequest:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=())
    return GenerationRequest(request_id=request_id, prompt_ids=[1, 2, 3, 4], params=params, pinned_version=pinned)


class ServedRig:
    """The replica, its server, and what came back."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        streams: Literal["kept", "closed"] = "kept",
        partial_rollout: bool = True,
        drain_seconds: float = 5.0,
        tokens_per_batch: int = 1,
    ) -> None:
        self.clock = clock
        self.events = RecordingEvents()
        self.server = FakeServer(clock, streams=streams, tokens_per_batch=tokens_per_batch)
        self.replica = ServedReplica(
            replica_id="replica-0",
            life=LIFE,
            server=self.server,
            read_label=read_label,
            partial_rollout=partial_rollout,
            drain_seconds=drain_seconds,
            clock=clock,
            events=self.events,
        )
        self._received = 0
        self.completions: dict[str, Completion] = {}
        self.ended: PacelineError | None = None

    async def stage(self, n: int, seconds: float = 20.0) -> None:
        command = StageCommand(manifest=manifest_of(n), sync_id=n, deadline_wall=self.clock.wall() + seconds)
        await self.replica.stage(command)

    async def swap(self, n: int, seconds: float = 20.0) -> SwapReport:
        deadline = self.clock.wall() + seconds
        return await self.replica.swap(SwapCommand(Version(LIFE, n).packed, sync_id=n, deadline_wall=deadline))

    async def sync(self, n: int, seconds: float = 20.0) -> SwapReport:
        await self.stage(n, seconds)
        return await self.swap(n, seconds)

    async def exchange(self, *requests: GenerationRequest, wait: float = 0.0, aborted: tuple[str, ...] = ()) -> None:
        asked = ExchangeRequest(list(requests), self._received, wait_seconds=wait, aborted=list(aborted))
        reply = await self.replica.exchange(asked)
        self._received = reply.batch
        for done in reply.completions:
            assert done.request_id not in self.completions, "a request ended twice"
            self.completions[done.request_id] = done

    async def finish(self, *request_ids: str) -> list[Completion]:
        while not set(request_ids) <= self.completions.keys():
            await self.exchange(wait=1.0)
        return [self.completions[request_id] for request_id in request_ids]


def with_rig(scenario: Callable[[ServedRig], Awaitable[None]], **options: object) -> ServedRig:
    """Run a scenario; an error that ended the replica's loop is in `ended`."""

    async def main(clock: VirtualClock) -> ServedRig:
        rig = ServedRig(clock, **options)  # type: ignore[arg-type]
        running = asyncio.ensure_future(rig.replica.run())
        async with asyncio.timeout(1000):
            await scenario(rig)
            await rig.replica.close()
            try:
                await running
            except PacelineError as error:
                rig.ended = error
        return rig

    return run_virtual(main)


def numbers(completion: Completion) -> list[int]:
    """The version numbers that a completion claims."""
    return [Version.unpack(version).n for version in completion.versions]


def makers(completion: Completion) -> list[int]:
    """The numbers of the weights that really made it."""
    return [int(-logprob) for logprob in completion.logprobs]
