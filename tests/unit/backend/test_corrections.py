"""Updates with a proximal policy, importance weights, bounds and a reference, against losses written out per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.backend.torch_backend import TorchBackend
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from paceline.core.sections.algorithm import RolloutCorrectionConfig
from tests.unit.backend.tiny_models import ragged_sequences, sequence, write_model

DECOUPLED = {"bypass_mode": False}
FAST = {"lr": 0.01, "lr_warmup_steps": 0}


def make(path: str, correction: dict[str, Any] | None = None, **actor: Any) -> TorchBackend:
    return TorchBackend(
        model_path=path,
        actor=ActorConfig.model_validate({"grad_clip": 1e9, "optim": FAST, **actor}),
        seed=0,
        correction=RolloutCorrectionConfig.model_validate(correction or {}),
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_model("qwen3", tmp_path / "model")


def on_policy(path: str) -> list[TrainSequence]:
    """The ragged sequences with rollout log-probs near to what the model gives, so that ratios are near 1."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    for number, item in enumerate(ragged_sequences()):
        with torch.no_grad():
            logprobs = per_token(model, item)
        shift = [0.15 * ((place + number) % 5 - 2) for place in range(len(item.response_ids))]
        rollout = [value + moved for value, moved in zip(logprobs.tolist(), shift, strict=True)]
        found.append(TrainSequence(item.prompt_ids, item.response_ids, rollout, item.loss_mask, item.advantage))
    return found


def per_token(model: Any, item: TrainSequence) -> Tensor:
    ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
    logprobs = model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1].log_softmax(-1)
    found: Tensor = logprobs.gather(1, torch.tensor(item.response_ids)[:, None])[:, 0]
    return found


# (log-probs, those of the proximal policy, those of the rollout, advantage, mask) of one sequence -> loss per token
Terms = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


def clipped(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = (logp - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))


def decoupled(logp: Tensor, prox: Tensor, rollout: Tensor, advantage: float, mask: Tensor) -> Tensor:
    return clipped(logp, prox, advantage)


def token_tis(logp: Tensor, prox: Tensor, rollout: Tensor, advantage: float, mask: Tensor) -> Tensor:
    return (prox - rollout).exp().clamp(max=1.1) * clipped(logp, prox, advantage)


def sequence_tis(logp: Tensor, prox: Tensor, rollout: Tensor, advantage: float, mask: Tensor) -> Tensor:
    return ((prox - rollout) * mask).sum().exp().clamp(max=1.1) * clipped(logp, prox, advantage)


def gspo(logp: Tensor, prox: Tensor, rollout: Tensor, advantage: float, mask: Tensor) -> Tensor:
    # The sequence's own loss, the same for each of its tokens: written as the paper's equation, not per token.
    ratio = (((logp - rollout) * mask).sum() / mask.sum()).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    return loss.expand(len(logp))


CASES: dict[str, tuple[Terms, dict[str, Any], dict[str, Any]]] = {
    "decoupled": (decoupled, DECOUPLED, {}),
    "token": (token_tis, {**DECOUPLED, "rollout_is": "token", "rollout_is_threshold": 1.1}, {}),
    "sequence": (sequence_tis, {**DECOUPLED, "rollout_is": "sequence", "rollout_is_threshold": 1.1}, {}),
    "gspo": (gspo, {}, {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch_tokens", [16, 16384])
def test_the_second_update_of_a_window_is_the_written_out_one(path: str, case: str, micro_batch_tokens: int) -> None:
    terms, correction, actor = CASES[case]
    sequences = on_policy(path)
    backend = make(path, correction, ppo_micro_batch_tokens=micro_batch_tokens, **actor)
    backend.update(TrainBatch(sequences, 1.0, window=7))
    moved = Path(path).parent / "moved"
    backend.save_pretrained(str(moved))
    metrics = backend.update(TrainBatch(sequences, 1.0, window=7))
    auto: Any = AutoModelForCausalLM
    model, first = (auto.from_pretrained(place, dtype=torch.float32) for place in (moved, path))
    losses, tokens = [], 0
    for item in sequences:
        mask, rollout = torch.tensor(item.loss_mask).float(), torch.tensor(item.rollout_logprobs)
        with torch.no_grad():
            proximal = per_token(first, item)
        per = terms(per_token(model, item), proximal, rollout, item.advantage, mask) * mask
        losses.append(per.sum() / mask.sum() if "loss_agg_mode" in actor else per.sum())
        tokens += int(mask.sum())
    loss = torch.stack(losses).sum() / (len(sequences) if "loss_agg_mode" in actor else tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    gradients = {name: tensor.grad for name, tensor in backend.named_tensors()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)
    assert 0 < metrics["actor/pg_clipfrac"] < 1 or case == "gspo"


def test_the_first_update_of_a_window_has_ratio_one(path: str) -> None:
    backend = make(path, DECOUPLED)
    batches = [TrainBatch(on_policy(path), 1.0, window=window) for window in (1, 1, 2, 2)]
    ratios = [backend.update(batch)["actor/ratio_max"] for batch in batches]
    assert (ratios[0], ratios[2]) == (1.0, 1.0)
    assert ratios[1] > 1.0 < ratios[3]


def test_without_windows_every_update_has_its_own_proximal_policy(path: str) -> None:
    backend = make(path, DECOUPLED)
    assert [backend.update(TrainBatch(on_policy(path), 1.0))["actor/ratio_max"] for _ in range(3)] == [1.0] * 3


def test_tokens_out_of_bounds_leave_the_loss_and_its_mean(path: str) -> None:
    item = on_policy(path)[0]
    far = [value - distance for value, distance in zip(item.rollout_logprobs, (0.0, 3.0, 0.0), strict=True)]
    outlier = TrainSequence(item.prompt_ids, item.response_ids, far, [1, 1, 1], 1.0)
    masked = TrainSequence(item.prompt_ids, item.response_ids, far, [1, 0, 1], 1.0)
    bounded = make(path, {"rollout_rs": "token", "rollout_rs_threshold": 2.0}).update(TrainBatch([outlier], 1.0))
    by_hand = make(path, {"rollout_rs": "token", "rollout_rs_threshold": 2.0}).update(TrainBatch([masked], 1.0))
    assert bounded["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert by_hand["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/loss_tokens", "rollout_corr/k3_kl"):
        assert bounded[name] == pytest.approx(by_hand[name], rel=1e-5)


def test_a_sequence_out_of_bounds_leaves_with_all_its_tokens(path: str) -> None:
    near, far = on_policy(path)[0], on_policy(path)[6]
    away = TrainSequence(
        far.prompt_ids, far.response_ids, [value - 2.0 for value in far.rollout_logprobs], [1] * 4, 1.0
    )
    found = make(path, {"rollout_rs": "geometric", "rollout_rs_threshold": 2.0}).update(TrainBatch([near, away], 1.0))
    assert found["actor/loss_tokens"] == 3.0
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(4 / 7)


def test_a_batch_that_is_wholly_out_of_bounds_makes_no_step(path: str) -> None:
    item = on_policy(path)[0]
    far = TrainSequence(item.prompt_ids, item.response_ids, [-50.0] * 3, [1] * 3, 1.0)
    found = make(path, {"rollout_rs": "token"}).update(TrainBatch([far], 1.0))
    assert (found["actor/skipped_empty"], found["rollout_corr/rollout_rs_masked_fraction"]) == (1.0, 1.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_reference_is_the_model_at_the_start(path: str, kind: str) -> None:
    backend = make(path, use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=0.0)
    losses = [backend.update(TrainBatch(on_policy(path), 1.0))["actor/kl_loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(losses[2]) > 1e-3


def test_a_resumed_backend_has_the_same_reference(path: str, tmp_path: Path) -> None:
    first, second = (make(path, use_kl_loss=True) for _ in range(2))
    batch = TrainBatch(on_policy(path), 1.0)
    first.update(batch)
    first.save_state(str(tmp_path))
    second.load_state(str(tmp_path))
    assert second.update(batch) == first.update(batch)


def test_a_heavy_penalty_holds_the_policy(path: str) -> None:
    def distance(coefficient: float) -> float:
        backend = make(path, use_kl_loss=True, kl_loss_type="k2", kl_loss_coef=coefficient)
        return [backend.update(TrainBatch(on_policy(path), 1.0))["actor/kl_loss"] for _ in range(6)][-1]

    assert distance(100.0) < distance(0.0) / 2


@pytest.mark.parametrize(
    ("correction", "actor"),
    [
        ({}, {}),
        (DECOUPLED, {}),
        ({**DECOUPLED, "rollout_is": "token"}, {}),
        ({"rollout_rs": "geometric"}, {"use_kl_loss": True}),
    ],
)
def test_an_update_without_tokens_has_the_metrics_of_any_other(
    path: str, correction: dict[str, Any], actor: dict[str, Any]
) -> None:
    backend = make(path, correction, **actor)
    full = backend.update(TrainBatch(ragged_sequences(), 1.0))
    empty = backend.update(TrainBatch([sequence((3,), [4], 1.0, mask=[0])], 1.0))
    assert list(full) == list(empty)
    assert all(math.isfinite(value) for value in (*full.values(), *empty.values()))
