"""Keys of what generates: the engine that the registry makes of a spec, on the shipped model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.core.errors import ConfigError
from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.engine.embedded_engine import EmbeddedEngine
from paceline.runtime import registry
from paceline.runtime.spec import RunSpec
from tests.unit.backend.tiny_models import write_model
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.config_keys.marker_run import run_marked

HOT = SamplingParams(temperature=5.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())
PROMPT = (20, 21, 14, 22, 23)


def engine_of(spec: RunSpec) -> InferenceEngine:
    """The engine of replica 0, serving the model that the trainer begins with."""
    engine = registry.engine_factory(spec, "replica-0", 1)()
    engine.bind(weights_of(spec, engine), 1)
    return engine


def weights_of(spec: RunSpec, engine: InferenceEngine) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, next(iter(engine.expected_tensors().values()))[0])
    tensors: dict[int, torch.Tensor] = {}
    named = {}
    for name, tensor in registry.build_backend(spec, 1).named_tensors():
        # Tied names share one tensor, as the engine expects.
        named[name] = tensors.setdefault(tensor.data_ptr(), tensor.detach().to(dtype))
    return named


def requests(params: SamplingParams, count: int) -> list[GenerationRequest]:
    return [GenerationRequest(str(index), list(PROMPT), params) for index in range(count)]


def generate(engine: InferenceEngine, params: SamplingParams, count: int = 32) -> list[list[int]]:
    engine.add(requests(params, count))
    done: list[Completion] = []
    while engine.running or engine.waiting:
        done += engine.step()
    return [c.token_ids for c in sorted(done, key=lambda completion: int(completion.request_id))]


def distinct(answers: Sequence[list[int]]) -> int:
    return len({tuple(tokens) for tokens in answers})


@pytest.mark.parametrize(
    "cold",
    [
        pytest.param({"rollout.temperature": 0.01}, id="temperature"),
        pytest.param({"rollout.temperature": 5.0, "rollout.top_p": 1e-6}, id="top_p"),
        pytest.param({"rollout.temperature": 5.0, "rollout.top_k": 1}, id="top_k"),
    ],
)
@shows("rollout.temperature", "rollout.top_p", "rollout.top_k")
def test_training_rollouts_are_sampled_as_configured(make_spec: MakeSpec, cold: dict[str, object]) -> None:
    engine = engine_of(make_spec(cold))
    assert distinct(generate(engine, run_marked({"rollout.temperature": 5.0}).sampling)) > 16
    assert distinct(generate(engine, run_marked(cold).sampling)) == 1


@shows("trainer.seed")
def test_the_seed_decides_what_is_sampled(make_spec: MakeSpec) -> None:
    first, again, other = (generate(engine_of(make_spec({"trainer.seed": seed})), HOT) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@shows("rollout.max_num_seqs")
def test_places_bound_what_decodes_at_once(make_spec: MakeSpec) -> None:
    def running(places: int) -> int:
        engine = engine_of(make_spec({"rollout.max_num_seqs": places}))
        engine.add(requests(HOT, 8))
        engine.step()
        return engine.running

    assert (running(3), running(6)) == (3, 6)


@shows("rollout.dtype")
def test_replicas_serve_weights_of_the_dtype(make_spec: MakeSpec) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(make_spec({"rollout.dtype": dtype}))
        generate(engine, HOT, 1)
        assert {str(tensor.dtype) for tensor in engine.served_tensors().values()} == {f"torch.{dtype}"}


@shows("rollout.kv_cache")
def test_a_swap_computes_the_cache_again_or_keeps_it(make_spec: MakeSpec) -> None:
    def tokens_after_a_swap(policy: str) -> int:
        spec = make_spec({"rollout.kv_cache": policy})
        engine = engine_of(spec)
        engine.add(requests(HOT, 1))
        engine.step()
        engine.bind(weights_of(spec, engine), 2)
        seen: list[int] = []

        def count(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if isinstance(module, nn.Embedding):
                seen.append(inputs[0].numel())

        hook = register_module_forward_pre_hook(count)
        engine.step()
        hook.remove()
        return sum(seen)

    assert tokens_after_a_swap("keep") == 1
    assert tokens_after_a_swap("recompute") == len(PROMPT) + 1


@shows("rollout.name")
def test_the_name_chooses_the_engine(make_spec: MakeSpec) -> None:
    assert type(engine_of(make_spec({"rollout.name": "embedded"}))) is EmbeddedEngine
    with pytest.raises(ConfigError, match=r"rollout\.name: input should be 'embedded' or 'vllm'"):
        config_with({"rollout.name": "another"})


@shows("model.path")
def test_trainer_and_replicas_take_the_model_of_the_path(make_spec: MakeSpec, tmp_path: Path) -> None:
    other = write_model("llama", tmp_path / "other")
    shapes = {
        path: registry.engine_factory(make_spec({"model.path": path}), "replica-0", 1)().expected_tensors()
        for path in (None, other)
    }
    assert shapes[None] != shapes[other]
    trained = {
        name: tuple(t.shape) for name, t in registry.build_backend(make_spec({"model.path": other}), 1).named_tensors()
    }
    assert trained == {name: shape for name, (_, shape) in shapes[other].items()}
