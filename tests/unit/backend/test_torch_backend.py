"""The gradient of an update against a loss written out per sequence, in every mode of aggregation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.algo.aggregation import LossAggMode
from paceline.backend.torch_backend import TorchBackend
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from tests.unit.backend.tiny_models import ragged_sequences, sequence, write_model

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
TEMPERATURE = 0.8


def token_loss(logprob: Tensor, rollout: float, advantage: float) -> Tensor:
    ratio = (logprob - rollout).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def written_out(
    path: str, sequences: list[TrainSequence], mode: LossAggMode, entropy_coeff: float
) -> dict[str, Tensor]:
    """Gradients by name, from one forward per sequence and Python sums."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    sums, means = [], []
    for item in sequences:
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        logprobs = (model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        kept = [place for place, mask in enumerate(item.loss_mask) if mask]
        terms = [
            token_loss(logprobs[place, item.response_ids[place]], item.rollout_logprobs[place], item.advantage)
            + entropy_coeff * (logprobs[place].exp() * logprobs[place]).sum()
            for place in kept
        ]
        sums.append(torch.stack(terms).sum())
        means.append(torch.stack(terms).mean())
    tokens = sum(sum(item.loss_mask) for item in sequences)
    loss = {
        "token-mean": torch.stack(sums).sum() / tokens,
        "seq-mean-token-mean": torch.stack(means).mean(),
        "seq-mean-token-sum": torch.stack(sums).mean(),
    }[mode]
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
@pytest.mark.parametrize("micro_batch_tokens", [16, 16384])
def test_gradient_is_that_of_the_written_out_loss(
    tmp_path: Path, mode: LossAggMode, entropy_coeff: float, micro_batch_tokens: int
) -> None:
    path = write_model("qwen3", tmp_path)
    actor = ActorConfig(
        loss_agg_mode=mode, entropy_coeff=entropy_coeff, ppo_micro_batch_tokens=micro_batch_tokens, grad_clip=1e9
    )
    backend = TorchBackend(model_path=path, actor=actor, seed=0)
    sequences = ragged_sequences()
    metrics = backend.update(TrainBatch(sequences, TEMPERATURE))
    expected = written_out(path, sequences, mode, entropy_coeff)
    gradients = {name: tensor.grad for name, tensor in backend.named_tensors()}
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_metrics_count_sequences_without_advantage_too(tmp_path: Path) -> None:
    path = write_model("qwen3", tmp_path)
    sequences = ragged_sequences()
    plain = TorchBackend(model_path=path, actor=ActorConfig(), seed=0).update(TrainBatch(sequences, 1.0))
    # With an entropy bonus every sequence goes through the backward pass.
    bonus = ActorConfig(entropy_coeff=1e-9)
    whole = TorchBackend(model_path=path, actor=bonus, seed=0).update(TrainBatch(sequences, 1.0))
    assert plain["actor/loss_tokens"] == sum(sum(item.loss_mask) for item in sequences)
    assert plain == pytest.approx(whole, rel=1e-4)


def test_a_batch_of_equal_groups_is_a_step_with_gradient_zero(tmp_path: Path) -> None:
    backend = TorchBackend(model_path=write_model("qwen3", tmp_path), actor=ActorConfig(), seed=0)
    metrics = backend.update(TrainBatch([sequence((3, 4), [5, 6], 0.0)], 1.0))
    assert (metrics["actor/grad_norm"], metrics["actor/pg_loss"]) == (0.0, 0.0)
    assert metrics["actor/skipped_empty"] == metrics["actor/skipped_nonfinite"] == 0.0
    assert metrics["actor/loss_tokens"] == 2.0
    assert metrics["actor/entropy"] > 0.0


def test_the_learning_rate_rises_linearly(tmp_path: Path) -> None:
    actor = ActorConfig.model_validate({"optim": {"lr": 0.4, "lr_warmup_steps": 4}})
    backend = TorchBackend(model_path=write_model("qwen3", tmp_path), actor=actor, seed=0)
    batch = TrainBatch([sequence((3, 4), [5, 6], 1.0)], 1.0)
    rates = [backend.update(batch)["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_weight_decay_and_betas_reach_the_optimiser(tmp_path: Path) -> None:
    path = write_model("qwen3", tmp_path)
    batch = TrainBatch(ragged_sequences(), 1.0)

    def weights_after(**optim: object) -> Tensor:
        actor = ActorConfig.model_validate({"optim": {"lr": 0.01, "lr_warmup_steps": 0, **optim}})
        backend = TorchBackend(model_path=path, actor=actor, seed=0)
        for _ in range(2):
            backend.update(batch)
        return dict(backend.named_tensors())["model.embed_tokens.weight"].detach()

    plain = weights_after()
    assert not torch.equal(plain, weights_after(weight_decay=0.5))
    assert not torch.equal(plain, weights_after(betas=(0.5, 0.95)))


def test_the_gradient_is_clipped(tmp_path: Path) -> None:
    backend = TorchBackend(model_path=write_model("qwen3", tmp_path), actor=ActorConfig(grad_clip=1e-3), seed=0)
    metrics = backend.update(TrainBatch(ragged_sequences(), 1.0))
    gradients = {id(tensor): tensor.grad for _, tensor in backend.named_tensors() if tensor.grad is not None}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert metrics["actor/grad_norm"] > 1e-2
    assert norm == pytest.approx(1e-3, rel=1e-2)
