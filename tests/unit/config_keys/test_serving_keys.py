"""Keys of replicas whose engine is a server: which servers, how they are asked, what a vLLM engine is built with."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.server_ports import InferenceServer
from paceline.runtime import serving
from paceline.runtime.system import SystemClock
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.engine.fake_vllm_http import FakeVllm
from tests.unit.engine.vllm_rig import DictModel, Rig


class TinyModel(DictModel):
    """What the shipped model says of itself."""

    def describe(self) -> dict[str, str]:
        return {"model_type": "qwen3", "dtype": "float32", "quantization": "", "logprobs_mode": "raw_logprobs"}


def with_servers(
    make_spec: MakeSpec,
    count: int,
    settings: dict[str, object],
    scenario: Callable[[list[InferenceServer], list[FakeVllm]], Awaitable[None]],
    api_key: str = "",
) -> None:
    async def main() -> None:
        rigs = [Rig(TinyModel()) for _ in range(count)]
        fakes = [FakeVllm(rig.worker, api_key=api_key) for rig in rigs]
        for fake in fakes:
            await fake.__aenter__()
        urls = [fake.url for fake in fakes]
        spec = make_spec({"rollout.name": "vllm", "rollout.servers": urls, "rollout.num_replicas": count, **settings})
        servers = [serving.build_server(spec, f"replica-{index}", 1) for index in range(count)]
        try:
            async with asyncio.timeout(60):
                await scenario(servers, fakes)
        finally:
            for server, fake in zip(servers, fakes, strict=True):
                await server.close()
                await fake.__aexit__()

    asyncio.run(main())


@shows("rollout.servers")
def test_each_url_is_one_replica(make_spec: MakeSpec) -> None:
    async def scenario(servers: list[InferenceServer], fakes: list[FakeVllm]) -> None:
        await servers[1].start()
        assert not fakes[0].calls
        assert fakes[1].calls
        await servers[0].start()
        assert fakes[0].calls

    with_servers(make_spec, 2, {}, scenario)
    with pytest.raises(ConfigError, match=r"set rollout\.num_replicas=1"):
        config_with({"rollout.name": "vllm", "rollout.servers": ["http://a:1"]})
    with pytest.raises(ConfigError, match="is not a URL"):
        config_with({"rollout.name": "vllm", "rollout.servers": ["a:1", "b:1"]})


def test_scaled_sampling_needs_the_log_probs_of_what_was_drawn(make_spec: MakeSpec) -> None:
    async def scenario(servers: list[InferenceServer], fakes: list[FakeVllm]) -> None:
        with pytest.raises(ConfigError, match="logprobs_mode raw_logprobs, but this run needs processed_logprobs"):
            await servers[0].start()

    with_servers(make_spec, 1, {"rollout.temperature": 0.7}, scenario)


@shows("rollout.server_api_key_env")
def test_the_api_key_comes_from_the_named_variable(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")

    async def refused(servers: list[InferenceServer], fakes: list[FakeVllm]) -> None:
        with pytest.raises(ConfigError):
            await servers[0].start()

    async def taken(servers: list[InferenceServer], fakes: list[FakeVllm]) -> None:
        await servers[0].start()

    with_servers(make_spec, 1, {}, refused, api_key="secret")
    with_servers(make_spec, 1, {"rollout.server_api_key_env": "THE_KEY"}, taken, api_key="secret")


@shows("rollout.server_wait_seconds")
def test_requests_of_others_get_so_long_to_end(make_spec: MakeSpec) -> None:
    def mixed_after(seconds: float) -> int:
        found: list[int] = []

        async def scenario(servers: list[InferenceServer], fakes: list[FakeVllm]) -> None:
            await servers[0].start()
            fakes[0].wait_seconds = 0.5
            found.append(await servers[0].pause(SystemClock().wall() + 60))

        with_servers(make_spec, 1, {"rollout.server_wait_seconds": seconds}, scenario)
        return found[0]

    assert mixed_after(0.1) == 3
    assert mixed_after(10.0) == 0


class FakeVllmLibrary:
    """Stands for the installed library: keeps what an engine was built with, and speaks the plug-in's protocol."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: dict[str, Any] = {}

        # What the engine tells vLLM by the environment is told here for the test alone.
        monkeypatch.setattr(os, "environ", os.environ.copy())
        monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())

        async def init_weight_transfer_engine(request: Any) -> None:
            return None

        def from_engine_args(arguments: dict[str, Any]) -> Any:
            self.built = arguments
            return SimpleNamespace(init_weight_transfer_engine=init_weight_transfer_engine, shutdown=lambda: None)

        contents: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.config": {},
            "vllm.config.weight_transfer": {"WeightTransferConfig": dict},
            "vllm.engine": {},
            "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
            "vllm.v1": {},
            "vllm.v1.engine": {},
            "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
            "vllm.distributed": {},
            "vllm.distributed.weight_transfer": {},
            "vllm.distributed.weight_transfer.base": {"WeightTransferInitRequest": dict},
        }
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)


@shows("rollout.tensor_parallel_size", "rollout.engine_kwargs.vllm")
def test_an_engine_is_built_as_configured(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeVllmLibrary(monkeypatch)

    def built(settings: dict[str, object]) -> dict[str, Any]:
        spec = make_spec({"rollout.name": "vllm", **settings})
        asyncio.run(serving.build_server(spec, "replica-0", 1).start())
        return library.built

    plain = built({})
    assert (plain["tensor_parallel_size"], plain["logprobs_mode"]) == (1, "processed_logprobs")
    assert "block_size" not in plain
    assert plain["enable_prefix_caching"]
    assert not built({"rollout.kv_cache": "keep"})["enable_prefix_caching"]
    chosen = built({"rollout.tensor_parallel_size": 2, "rollout.engine_kwargs.vllm": {"block_size": 64}})
    assert (chosen["tensor_parallel_size"], chosen["block_size"]) == (2, 64)
    with pytest.raises(ConfigError, match=r"need rollout\.name=vllm"):
        config_with({"rollout.tensor_parallel_size": 2})


def test_engines_of_one_machine_take_gpus_of_their_own(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeVllmLibrary(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def taken(replica: str, nodes: int) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        settings: dict[str, object] = {"rollout.nnodes": nodes} if nodes > 1 else {}
        if nodes > 1:
            settings["checkpoint_engine.backend"] = "filesystem"
            settings["checkpoint_engine.engine_kwargs.filesystem.url"] = "/somewhere"
        spec = make_spec(
            {"rollout.name": "vllm", "rollout.tensor_parallel_size": 2, "rollout.num_replicas": 4, **settings}
        )
        asyncio.run(serving.build_server(spec, replica, 1).start())
        return os.environ["CUDA_VISIBLE_DEVICES"]

    assert [taken(f"replica-{number}", 1) for number in range(4)] == ["4,5", "6,7", "4,5", "6,7"]
    assert [taken(f"replica-{number}", 2) for number in range(4)] == ["4,5", "4,5", "6,7", "6,7"]


def test_without_vllm_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    serving.check_serving(config_with({}))
    with pytest.raises(ConfigError, match="pip install vllm"):
        serving.check_serving(config_with({"rollout.name": "vllm"}))
