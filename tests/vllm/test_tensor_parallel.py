"""An engine of two workers: both load, what changed and everything alike, and its log-probs are the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint_engine.shared_memory import SharedMemorySender
from paceline.core.sample import GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.engine.vllm_async import VllmEngine, VllmOptions
from paceline.engine.vllm_commands import ReceiverSpec
from paceline.engine.vllm_control import VllmWeights
from paceline.runtime.system import SystemClock
from paceline.testing.publication import publish
from tests.vllm.fleet import PATIENCE_SECONDS, TEMPERATURE, prompt, shipped_model
from tests.vllm.trainer_logprobs import TrainerModel

CLOSE = 1e-3
CHANGES = ("", "layers.0.self_attn", "norm", "embed")
CLOCK = SystemClock()


def weights_of(calls: VllmEngine, extent: Literal["full", "changed"]) -> VllmWeights:
    spec = ReceiverSpec("shared_memory", deadline_seconds=PATIENCE_SECONDS)
    return VllmWeights(calls, name="engine", receiver=spec, clock=CLOCK, extent=extent)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedMemorySender]:
    sender = SharedMemorySender(directory=str(tmp_path), arenas=3)
    yield sender
    sender.close()


def test_every_worker_serves_its_share_of_each_version(sender: SharedMemorySender) -> None:
    options = VllmOptions(
        model=shipped_model(),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        tensor_parallel_size=2,
        call_seconds=PATIENCE_SECONDS,
    )
    engine = VllmEngine(options, name="engine", clock=CLOCK, make_weights=partial(weights_of, extent="changed"))
    tensors = {name: t.float() for name, t in load_file(f"{shipped_model()}/model.safetensors").items()}
    model = TrainerModel(shipped_model())

    async def version(number: int, only: str) -> None:
        for name, tensor in tensors.items():
            if number and only in name:
                tensors[name] = tensor + 0.05 * tensor.std() * torch.randn(tensor.shape)
        manifest = publish(sender, tensors.items(), Version(1, number).packed)
        assert (await engine.stage(manifest, CLOCK.wall() + PATIENCE_SECONDS)).digest == manifest.digest
        await engine.pause(CLOCK.wall() + PATIENCE_SECONDS)
        await engine.load(manifest.version)
        await engine.confirm(manifest.version, manifest.digest)
        sums = await engine.checksums()
        everything = weights_of(engine, "full")
        await everything.load(manifest.version)
        await everything.confirm(manifest.version, manifest.digest)
        assert sums == await engine.checksums()
        assert {name.split(":")[3] for name in sums} == {"tp0", "tp1"}
        await engine.resume()

    async def check_logprobs(number: int) -> None:
        params = SamplingParams(temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=16, stop_token_ids=())
        request = GenerationRequest(f"request-{number}", prompt(number), params)
        batches = [batch async for batch in engine.generate(request)]
        ids = [token for batch in batches for token in batch.token_ids]
        model.load(tensors)
        right = model.logprobs(prompt(number), ids, TEMPERATURE)
        assert [x for batch in batches for x in batch.logprobs] == pytest.approx(right, abs=CLOSE)

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await engine.start()
            try:
                for number, only in enumerate(CHANGES):
                    await version(number, only)
                    await check_logprobs(number)
            finally:
                await engine.close()

    asyncio.run(scenario())
