"""Keys that are used before or while a run starts: data, directories, displays, restarts, nodes."""

from __future__ import annotations

import asyncio
import io
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, WorkerDied
from paceline.core.ports import PromptSource
from paceline.runtime import registry, task_parts
from paceline.runtime.placement import Node, place_replicas
from paceline.runtime.ray_address import cluster_address
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.task_runner import FullyAsyncTaskRunner, _displays
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import config_with, shows


def prompts_of(settings: dict[str, object]) -> PromptSource:
    config = config_with(settings)
    directory = registry.model_path(config)
    return task_parts.build_prompts(config, task_parts.build_renderer(config, FastTokenizer(str(directory)), directory))


@shows("data.seed")
def test_the_seed_decides_the_order_of_prompts() -> None:
    def first(seed: int) -> list[str]:
        source = prompts_of({"data.seed": seed})
        return [prompt.text for _ in range(20) if (prompt := source.next_prompt()) is not None]

    assert first(0) == first(0) != first(1)


@shows("data.val_size")
def test_so_many_problems_are_validated() -> None:
    assert len(prompts_of({"data.val_size": 7}).validation_prompts()) == 7
    assert len(prompts_of({"data.val_size": 70}).validation_prompts()) == 70
    with pytest.raises(ConfigError, match=r"data\.val_size: .* has \d+ validation problems"):
        prompts_of({"data.val_size": 10**6})


@shows("data.max_prompt_length")
def test_a_longer_prompt_is_refused() -> None:
    assert prompts_of({"data.max_prompt_length": 16}).next_prompt() is not None
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length: .* has \d tokens, more than 4"):
        prompts_of({"data.max_prompt_length": 4})


@shows("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
def test_the_run_directory_has_their_names(make_spec: MakeSpec, tmp_path: Path) -> None:
    names: dict[str, object] = {
        "trainer.default_local_dir": str(tmp_path / "mine"),
        "trainer.project_name": "sums",
        "trainer.experiment_name": "first",
    }
    assert Path(make_spec(names).run_dir).parent == tmp_path / "mine" / "sums" / "first"
    assert Path(make_spec({}).run_dir).parent == tmp_path / "runs" / "paceline" / "arithmetic"


@shows("trainer.logger")
def test_loggers_are_those_that_are_named(make_spec: MakeSpec) -> None:
    def kinds(*names: str) -> list[str]:
        return [type(display).__name__ for display in _displays(make_spec({"trainer.logger": names}), io.StringIO())]

    assert kinds() == []
    assert kinds("console") == ["PlainLines"]
    assert kinds("console", "tensorboard") == ["PlainLines", "TensorBoardLog"]


class Part:
    """Runs for ever, or dies at once."""

    def __init__(self, role: str) -> None:
        self.replica_id = role

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: object, **keywords: object) -> None:
            if method == "run" and self.replica_id == "replica-0":
                raise WorkerDied("replica-0 died", "replica-0")
            if method in ("run", "next_loss"):
                await asyncio.Event().wait()

        return call


class Runtime:
    """Counts what is launched."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    async def start(self) -> None:
        return

    def launch(self, role: str) -> Part:
        self.launched.append(role)
        return Part(role)

    async def connect(self) -> None:
        return

    def kill(self, role: str) -> None:
        return

    def stop(self, deadline_seconds: float) -> None:
        return


@shows("rollout.max_replica_restarts")
def test_a_dying_replica_is_started_so_often_again(make_spec: MakeSpec) -> None:
    def starts(restarts: int) -> int:
        spec = make_spec({"rollout.max_replica_restarts": restarts, "rollout.num_replicas": 1})
        runtime = Runtime()
        with StopSignal() as stop, pytest.raises(WorkerDied, match="replica-0 died"):
            asyncio.run(FullyAsyncTaskRunner(spec, runtime, [], stop=stop, command_wall=0.0).run())
        return runtime.launched.count("replica-0")

    assert (starts(0), starts(2)) == (1, 3)


@shows("rollout.nnodes")
def test_replicas_are_spread_over_so_many_nodes() -> None:
    def used(nnodes: int) -> set[str]:
        config = config_with(
            {"rollout.nnodes": nnodes, "rollout.num_replicas": 4, "checkpoint_engine.backend": "ray_object"}
        )
        nodes = [Node(node_id=name, name=name, store_bytes=1 << 30) for name in ("home", "b", "c", "d")]
        replicas = [f"replica-{i}" for i in range(4)]
        return {node.name for node in place_replicas(config, replicas, nodes, "home", 1 << 20).values()}

    assert (used(1), used(2), used(3)) == ({"b"}, {"b", "c"}, {"b", "c", "d"})


@shows("ray.address")
def test_a_cluster_that_does_not_answer_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cluster_address(config_with({"ray.address": address})) == address
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        cluster_address(config_with({"ray.address": address}))
    assert cluster_address(config_with({})) is None
