"""Three served replicas of the shipped model, a trainer's end that publishes versions, and clients that keep asking."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Coroutine
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import load_file

from paceline.checkpoint_engine.shared_memory import SharedMemorySender
from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand, SwapReport
from paceline.core.manifest import WeightManifest
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.server_ports import InferenceServer
from paceline.core.version import Version
from paceline.engine.vllm_async import VllmEngine, VllmOptions
from paceline.engine.vllm_commands import Hello, ReceiverSpec, version_of_label
from paceline.engine.vllm_control import VllmWeights
from paceline.engine.vllm_http import VllmHttpServer
from paceline.rollout.served_replica import ServedReplica
from paceline.runtime.system import SystemClock
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingEvents
from tests.vllm.stock_server import BLOCK, StockServer

T = TypeVar("T")

LIFE = 1
PROMPT_TOKENS = 2 * BLOCK + 8  # two whole blocks, so that the prefix cache has something to keep
TEMPERATURE = 0.8
WAIT_SECONDS = 10.0
PATIENCE_SECONDS = 240.0  # a machine that does other things at the same time


def shipped_model() -> str:
    """Directory of the model in the package."""
    return str(Path(str(resources.files("paceline"))) / "assets/tiny_model")


def prompt(seed: int) -> list[int]:
    """Some token ids; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 60, (PROMPT_TOKENS,), generator=generator).tolist()
    return ids


class Client:
    """Keeps so many requests going on one replica and collects what comes back."""

    def __init__(self, replica: ServedReplica, *, at_once: int, tokens: int) -> None:
        self._replica = replica
        self._at_once = at_once
        self._tokens = tokens
        self._numbers = itertools.count()
        self._name = f"{replica.replica_id}:{secrets.token_hex(4)}"
        self._acknowledged = 0
        self.stopping = False
        self.done: dict[str, Completion] = {}
        self.prompts: dict[str, list[int]] = {}
        self._came = asyncio.Event()

    async def more(self, count: int) -> None:
        """Return once so many more requests have come back."""
        wanted = len(self.done) + count
        while len(self.done) < wanted:
            await self._came.wait()

    async def run(self) -> None:
        """Until `stopping`, then until everything has come back."""
        owed: set[str] = set()
        while owed or not self.stopping:
            fresh = [] if self.stopping else [self._request() for _ in range(self._at_once - len(owed))]
            owed.update(request.request_id for request in fresh)
            reply = await self._replica.exchange(ExchangeRequest(fresh, self._acknowledged, wait_seconds=0.05))
            self._acknowledged = reply.batch
            mine = [c for c in reply.completions if c.request_id in self.prompts]  # not those of a client before
            for completion in mine:
                assert completion.request_id not in self.done, "a request came back twice"
                self.done[completion.request_id] = completion
                owed.discard(completion.request_id)
            self._came.set()
            self._came.clear()

    def _request(self) -> GenerationRequest:
        number = next(self._numbers)
        name = f"{self._name}:{number}"
        self.prompts[name] = prompt(number % 5)
        params = SamplingParams(
            temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=8 + number * 7 % self._tokens, stop_token_ids=()
        )
        return GenerationRequest(name, list(self.prompts[name]), params)


class Fleet:
    """`replicas` 0 and 1 are engines of our own, 2 is the stock server. 1 always loads everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runner = asyncio.Runner()
        self.clock = SystemClock()
        self.events = RecordingEvents()
        self.server = StockServer(shipped_model(), directory)
        self.sender = SharedMemorySender(directory=str(directory), arenas=4)
        self.tensors = {name: t.float() for name, t in load_file(f"{shipped_model()}/model.safetensors").items()}
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.ports: list[InferenceServer] = []
        self.replicas: list[ServedReplica] = []
        self.loops: list[asyncio.Task[None]] = []
        self.newest = -1

    def run(self, main: Coroutine[Any, Any, T], seconds: float = 500.0) -> T:
        """Run on the one loop of the fleet."""

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await main

        return self._runner.run(bounded())

    def start(self) -> None:
        """All three, and the first version."""
        self.server.start()
        self.run(self._start())

    async def _start(self) -> None:
        extents: tuple[Literal["changed", "full"], ...] = ("changed", "full")
        for number, extent in enumerate(extents):
            options = VllmOptions(
                model=shipped_model(),
                dtype="float32",
                max_model_len=128,
                max_num_seqs=32,
                call_seconds=PATIENCE_SECONDS,
                further={"block_size": BLOCK},
            )
            engine = VllmEngine(
                options,
                name=f"replica-{number}",
                clock=self.clock,
                hello=Hello(model_type="qwen3", dtype="float32"),
                make_weights=partial(self._weights, name=f"replica-{number}", extent=extent),
            )
            await self._add(engine, number)
        await self._add(self.http_server(WAIT_SECONDS), 2)
        await self.sync(self.changed_weights(0.0))

    def http_server(self, wait_seconds: float) -> VllmHttpServer:
        """What drives the stock server; requests of others get so long to end."""
        return VllmHttpServer(
            self.server.url,
            name="replica-2",
            clock=self.clock,
            hello=Hello(model_type="qwen3", dtype="float32"),
            make_weights=partial(self._weights, name="replica-2", extent="changed"),
            start_seconds=PATIENCE_SECONDS,
            call_seconds=PATIENCE_SECONDS,
            wait_seconds=wait_seconds,
        )

    async def _add(self, server: InferenceServer, number: int) -> None:
        await server.start()
        replica = ServedReplica(
            replica_id=f"replica-{number}",
            life=LIFE,
            server=server,
            read_label=version_of_label,
            partial_rollout=True,
            drain_seconds=20.0,
            clock=self.clock,
            events=self.events,
        )
        self.ports[number : number + 1] = [server]
        self.replicas[number : number + 1] = [replica]
        self.loops[number : number + 1] = [asyncio.ensure_future(replica.run())]

    async def meet_server_again(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """A new replica over the stock server; the one before lets go of it."""
        await self.replicas[2].close()
        await asyncio.gather(self.loops[2], return_exceptions=True)
        await self._add(self.http_server(wait_seconds), 2)

    def _weights(self, calls: Any, name: str, extent: Literal["full", "changed"]) -> VllmWeights:
        return VllmWeights(
            calls,
            name=name,
            receiver=ReceiverSpec("shared_memory", deadline_seconds=PATIENCE_SECONDS),
            clock=self.clock,
            extent=extent,
        )

    def stop(self) -> None:
        """End everything."""

        async def end() -> None:
            for replica in self.replicas:
                await replica.close()
            await asyncio.gather(*self.loops, return_exceptions=True)

        try:
            self.run(end(), 60.0)
        finally:
            self.server.kill()
            self.sender.close()
            self._runner.close()

    # -- versions ------------------------------------------------------------------------------------------------------

    def changed_weights(self, size: float, only: str = "") -> dict[str, torch.Tensor]:
        """The weights with noise on those tensors whose name has `only` in it."""
        generator = torch.Generator().manual_seed(self.newest + 100)
        for name, tensor in self.tensors.items():
            if only in name and size:
                noise = torch.randn(tensor.shape, generator=generator)
                self.tensors[name] = tensor + size * tensor.std() * noise
        return self.tensors

    def publish(self, tensors: dict[str, torch.Tensor]) -> WeightManifest:
        """The next version."""
        self.newest += 1
        self.versions[self.newest] = dict(tensors)
        return publish(self.sender, tensors.items(), Version(LIFE, self.newest).packed)

    async def sync(self, tensors: dict[str, torch.Tensor]) -> tuple[WeightManifest, list[SwapReport]]:
        """Publish, and bring it to all replicas."""
        manifest = self.publish(tensors)
        return manifest, list(await asyncio.gather(*(self.bring(replica, manifest) for replica in self.replicas)))

    async def bring(self, replica: ServedReplica, manifest: WeightManifest) -> SwapReport:
        """Stage and swap on one."""
        deadline = self.clock.wall() + PATIENCE_SECONDS
        report = await replica.stage(StageCommand(manifest=manifest, sync_id=0, deadline_wall=deadline))
        assert report.digest == manifest.digest
        return await replica.swap(SwapCommand(version=manifest.version, sync_id=0, deadline_wall=deadline))
