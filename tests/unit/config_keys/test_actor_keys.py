"""Keys of the optimiser's step: two updates of a tiny random model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.backend.torch_backend import TorchBackend
from paceline.core.sample import TrainBatch
from tests.unit.backend.tiny_models import ragged_sequences, write_model
from tests.unit.config_keys.keys import config_with, shows


@dataclass
class Learned:
    """After two updates over the same batch."""

    metrics: list[dict[str, float]]
    before: torch.Tensor
    weights: torch.Tensor
    gradient_norm: float
    forwards: int

    @property
    def distance(self) -> float:
        return float((self.weights - self.before).norm())


Learn = Callable[..., Learned]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("qwen3", Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def learn(model_path: str) -> Learn:
    """`learn(lr=0.1)` with `actor.optim.lr`, `learn(grad_clip=1)` with `actor.grad_clip`; large rate, no warm-up."""

    def run(optim: dict[str, object] | None = None, **actor: object) -> Learned:
        settings = {f"actor.{key}": value for key, value in actor.items()}
        rates = {"lr": 0.01, "lr_warmup_steps": 0, **(optim or {})}
        config = config_with({**settings, **{f"actor.optim.{key}": value for key, value in rates.items()}})
        backend = TorchBackend(model_path=model_path, actor=config.actor, seed=0)
        before = flat(backend)
        forwards: list[str] = []

        def count(module: nn.Module, inputs: object) -> None:
            if isinstance(module, nn.Embedding):
                forwards.append("one")

        hook = register_module_forward_pre_hook(count)
        metrics = [backend.update(TrainBatch(ragged_sequences(), 1.0)) for _ in range(2)]
        hook.remove()
        gradients = {id(t): t.grad.flatten() for _, t in backend.named_tensors() if t.grad is not None}
        norm = torch.cat(list(gradients.values())).norm().item()
        return Learned(metrics, before, flat(backend), norm, len(forwards))

    return run


def flat(backend: TorchBackend) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in backend.named_tensors()]).clone()


@shows("actor.optim.lr")
def test_a_larger_rate_moves_the_weights_further(learn: Learn) -> None:
    still, slow, fast = (learn({"lr": rate}).distance for rate in (0.0, 0.001, 0.01))
    assert still == 0.0
    assert 0.0 < 2 * slow < fast


@shows("actor.optim.lr_warmup_steps")
def test_the_rate_rises_over_the_warm_up(learn: Learn) -> None:
    assert [m["actor/lr"] for m in learn({"lr_warmup_steps": 0}).metrics] == pytest.approx([0.01, 0.01])
    warm = learn({"lr_warmup_steps": 10})
    assert [m["actor/lr"] for m in warm.metrics] == pytest.approx([0.001, 0.002])
    assert warm.distance < learn().distance / 2


@shows("actor.optim.weight_decay")
def test_decay_makes_weights_smaller(learn: Learn) -> None:
    assert learn({"weight_decay": 5.0}).weights.norm() < learn().weights.norm()


@shows("actor.optim.betas")
def test_betas_change_the_second_step(learn: Learn) -> None:
    assert not torch.equal(learn({"betas": (0.5, 0.95)}).weights, learn().weights)
    assert not torch.equal(learn({"betas": (0.9, 0.5)}).weights, learn().weights)


@shows("actor.grad_clip")
def test_the_gradient_is_no_longer_than_the_clip(learn: Learn) -> None:
    assert learn(grad_clip=1e6).gradient_norm > 0.1
    assert learn(grad_clip=0.01).gradient_norm == pytest.approx(0.01, rel=0.01)


@shows("actor.clip_ratio_low", "actor.clip_ratio_high")
@pytest.mark.parametrize(("key", "width"), [("clip_ratio_low", 0.99), ("clip_ratio_high", 1e6)])
def test_a_narrow_clip_takes_tokens_out_of_the_gradient(learn: Learn, key: str, width: float) -> None:
    narrow, wide = learn(**{key: 0.01}), learn(**{key: width})
    assert narrow.metrics[0]["actor/pg_clipfrac"] > wide.metrics[0]["actor/pg_clipfrac"]
    assert narrow.metrics[0]["actor/pg_loss"] != wide.metrics[0]["actor/pg_loss"]


@shows("actor.loss_agg_mode")
def test_modes_weigh_tokens_differently(learn: Learn) -> None:
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    assert len({learn(loss_agg_mode=mode).metrics[0]["actor/pg_loss"] for mode in modes}) == 3


@shows("actor.entropy_coeff")
def test_a_bonus_makes_entropy_grow(learn: Learn) -> None:
    plain, bonus = learn(), learn(entropy_coeff=1.0)
    assert bonus.metrics[1]["actor/entropy"] > plain.metrics[1]["actor/entropy"]


@shows("actor.ppo_micro_batch_tokens")
def test_small_micro_batches_take_more_passes_and_change_nothing_else(learn: Learn) -> None:
    small, large = learn(ppo_micro_batch_tokens=16), learn(ppo_micro_batch_tokens=16384)
    assert small.forwards > large.forwards
    assert small.metrics[0]["actor/pg_loss"] == pytest.approx(large.metrics[0]["actor/pg_loss"], rel=1e-4)
