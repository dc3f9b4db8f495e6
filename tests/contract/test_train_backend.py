"""What every train backend promises (`core.ports.TrainBackend`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.backend.torch_backend import TorchBackend
from paceline.core.errors import ConfigError
from paceline.core.ports import TrainBackend
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from tests.unit.backend.tiny_models import ragged_sequences, sequence, write_model


class MakeBackend(Protocol):
    def __call__(self, *, model_path: str, actor: ActorConfig, seed: int) -> TrainBackend: ...


BACKENDS: dict[str, MakeBackend] = {"torch": TorchBackend}
FAST = ActorConfig.model_validate({"optim": {"lr": 0.01, "lr_warmup_steps": 0}})


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> MakeBackend:
    return BACKENDS[request.param]


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return write_model("qwen3", tmp_path / "model")


def batch(sequences: list[TrainSequence] | None = None) -> TrainBatch:
    return TrainBatch(sequences or ragged_sequences(), 1.0)


def copies(backend: TrainBackend) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.named_tensors()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_updates_make_good_responses_likelier_and_bad_ones_rarer(
    make: MakeBackend, model_path: str, advantage: float
) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    one = batch([sequence((3, 4, 5), [6, 7, 1], advantage)])
    # actor/ppo_kl is rollout minus trainer log-prob: it falls as the response gets likelier.
    before, *_, after = [backend.update(one)["actor/ppo_kl"] for _ in range(4)]
    assert (before - after) * advantage > 0.05


def test_named_tensors_are_live_stable_and_hold_every_tied_name(make: MakeBackend, model_path: str) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    before = copies(backend)
    backend.update(batch())
    after = dict(backend.named_tensors())
    assert list(before) == list(after)
    assert after["lm_head.weight"].data_ptr() == after["model.embed_tokens.weight"].data_ptr()
    assert all(not torch.equal(before[name], after[name]) for name in after)


def test_a_saved_model_loads_with_the_same_tensors(make: MakeBackend, model_path: str, tmp_path: Path) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    backend.update(batch())
    saved = tmp_path / "new" / "final"
    backend.save_pretrained(str(saved))
    reloaded = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert_same(copies(backend), {name: value.detach() for name, value in reloaded.state_dict().items()})
    assert (saved / "tokenizer.json").read_bytes() == Path(model_path, "tokenizer.json").read_bytes()
    assert_same(copies(backend), copies(make(model_path=str(saved), actor=FAST, seed=0)))


def test_the_same_batches_give_the_same_bits(make: MakeBackend, model_path: str) -> None:
    first, second = (make(model_path=model_path, actor=FAST, seed=3) for _ in range(2))
    for backend in (first, second):
        for _ in range(3):
            backend.update(batch())
    assert_same(copies(first), copies(second))


def test_micro_batches_change_nothing(make: MakeBackend, model_path: str) -> None:
    small = ActorConfig(ppo_micro_batch_tokens=16)
    metrics = [make(model_path=model_path, actor=actor, seed=0).update(batch()) for actor in (small, ActorConfig())]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(make: MakeBackend, model_path: str, broken: float) -> None:
    hit, spared = (make(model_path=model_path, actor=FAST, seed=0) for _ in range(2))
    for backend in (hit, spared):
        backend.update(batch())
    before = copies(hit)
    metrics = hit.update(batch([*ragged_sequences(), sequence((3, 4), [5, 6], broken)]))
    assert metrics["actor/skipped_nonfinite"] == 1.0
    assert not math.isfinite(metrics["actor/grad_norm"])
    assert_same(before, copies(hit))
    for backend in (hit, spared):
        assert backend.update(batch())["actor/skipped_nonfinite"] == 0.0
    assert_same(copies(spared), copies(hit))


@pytest.mark.parametrize("sequences", [[sequence((3, 4), [5, 6], 1.0, mask=[0, 0])], [sequence((3, 4), [], 1.0)]])
def test_a_batch_without_tokens_in_the_loss_makes_no_step(
    make: MakeBackend, model_path: str, sequences: list[TrainSequence]
) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    backend.update(batch())
    before = copies(backend)
    metrics = backend.update(batch(sequences))
    assert metrics["actor/skipped_empty"] == 1.0
    assert metrics["actor/loss_tokens"] == 0.0
    assert_same(before, copies(backend))


def test_learning_rate_zero_changes_nothing(make: MakeBackend, model_path: str) -> None:
    actor = ActorConfig.model_validate({"optim": {"lr": 0.0}})
    backend = make(model_path=model_path, actor=actor, seed=0)
    before = copies(backend)
    assert backend.update(batch())["actor/grad_norm"] > 0.0
    assert_same(before, copies(backend))


def test_every_update_has_the_same_metrics(make: MakeBackend, model_path: str) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    full = backend.update(batch())
    assert full.keys() == backend.update(batch([sequence((3,), [4], 1.0, mask=[0])])).keys()
    assert {
        "actor/pg_loss",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/ratio_max",
        "actor/logprob_diff_mean",
    } <= full.keys()
    assert all(math.isfinite(value) for value in full.values())


@pytest.mark.parametrize(
    "wrong",
    [
        TrainSequence((3, 4), [5, 6], [-1.0], [1, 1], 1.0),
        TrainSequence((3, 4), [5, 6], [-1.0, -1.0], [1], 1.0),
        TrainSequence((), [5], [-1.0], [1], 1.0),
    ],
)
def test_a_malformed_sequence_is_refused(make: MakeBackend, model_path: str, wrong: TrainSequence) -> None:
    backend = make(model_path=model_path, actor=FAST, seed=0)
    with pytest.raises(ValueError, match="sequence 1: "):
        backend.update(batch([sequence((3, 4), [5], 1.0), wrong]))


def test_a_missing_model_is_a_configuration_error(make: MakeBackend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        make(model_path=str(tmp_path / "nowhere"), actor=FAST, seed=0)
