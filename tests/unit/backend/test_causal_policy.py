"""Log-probs in a padded or shared layout are those of each sequence alone, for several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.backend.causal_lm import load_causal_lm
from paceline.backend.causal_policy import LONGEST_SHARED_ROW, CausalPolicy, TokenDistributions
from paceline.backend.logit_head import find_logit_head
from paceline.backend.packing import MicroBatch, collate, plan_rows
from paceline.core.sample import TrainSequence
from tests.unit.backend.tiny_models import ragged_sequences, write_model


def alone(model: PreTrainedModel, sequence: TrainSequence, temperature: float) -> Tensor:
    """Log-probs over the vocabulary [R, V] from the model's own forward of this sequence alone."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return (logits[len(sequence.prompt_ids) - 1 : -1].float() / temperature).log_softmax(-1)


def laid_out(sequences: list[TrainSequence], longest: int) -> MicroBatch:
    return collate(plan_rows(sequences, range(len(sequences)), longest), sequences, [1.0] * len(sequences))


def check(model: PreTrainedModel, batch: MicroBatch, found: TokenDistributions, temperature: float) -> None:
    sequences = ragged_sequences()
    with torch.no_grad():
        expected = torch.cat([alone(model, sequences[index], temperature) for index in batch.members])
    logprobs = expected.gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "bloom", "mistral", "lfm2", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("sharing", ["own rows", "shared rows"])
def test_logprobs_and_entropies_are_those_of_the_sequence_alone(
    tmp_path: Path, name: str, temperature: float, sharing: str
) -> None:
    policy = CausalPolicy.of(load_causal_lm(write_model(name, tmp_path)))
    assert policy.head is not None
    batch = laid_out(ragged_sequences(), policy.longest_shared_row() if sharing == "shared rows" else 0)
    with torch.no_grad():
        check(policy.model, batch, policy.distributions(batch, temperature), temperature)


def test_scaling_and_capping_of_logits_are_found(tmp_path: Path) -> None:
    forms = {}
    for name in ("gemma2", "cohere", "granite", "qwen3"):
        head = find_logit_head(load_causal_lm(write_model(name, tmp_path / name)))
        assert head is not None
        forms[name] = (head.form.scale, head.form.softcap)
    assert forms == {"gemma2": (1.0, 3.0), "cohere": (0.25, None), "granite": (0.5, None), "qwen3": (1.0, None)}


def twist(model: PreTrainedModel) -> None:
    """Make the model do to its logits what no configuration tells."""
    forward = model.forward

    def twisted(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * 1.5
        return output

    model.forward = twisted


def test_a_model_that_does_something_else_makes_all_its_logits(tmp_path: Path) -> None:
    model = load_causal_lm(write_model("qwen3", tmp_path))
    twist(model)
    policy = CausalPolicy.of(model)
    assert policy.head is None
    batch = laid_out(ragged_sequences(), 0)
    with torch.no_grad():
        check(model, batch, policy.distributions(batch, 0.7), 0.7)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere"])
def test_gradients_are_those_of_the_models_own_forward(tmp_path: Path, name: str) -> None:
    model = load_causal_lm(write_model(name, tmp_path))
    batch = laid_out(ragged_sequences(), 0)
    found = CausalPolicy.of(model).distributions(batch, 0.7)
    parameters = dict(model.named_parameters())
    mine = torch.autograd.grad(found.logprobs.sum() + found.entropies.sum(), list(parameters.values()))
    log_p = torch.cat([alone(model, ragged_sequences()[index], 0.7) for index in batch.members])
    plain = log_p.gather(1, batch.targets[:, None]).sum() - (log_p.exp() * log_p).sum()
    for gradient, expected in zip(mine, torch.autograd.grad(plain, list(parameters.values())), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("qwen3", LONGEST_SHARED_ROW),
        ("llama", LONGEST_SHARED_ROW),
        ("gpt2", LONGEST_SHARED_ROW),
        ("bloom", 0),
        ("lfm2", 0),
    ],
)
def test_rows_are_shared_where_the_model_allows_it(tmp_path: Path, name: str, longest: int) -> None:
    assert CausalPolicy.of(load_causal_lm(write_model(name, tmp_path))).longest_shared_row() == longest


def test_a_shared_row_is_no_longer_than_the_window(tmp_path: Path) -> None:
    assert CausalPolicy.of(load_causal_lm(write_model("mistral", tmp_path))).longest_shared_row() == 9


@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_a_narrow_copy_has_the_same_form_of_logits(tmp_path: Path, name: str) -> None:
    policy = CausalPolicy.of(load_causal_lm(write_model(name, tmp_path)))
    narrow = policy.frozen(torch.bfloat16)
    assert policy.head is not None
    assert narrow.head is not None
    assert narrow.head.form == policy.head.form
    assert narrow.head.weight.data_ptr() != policy.head.weight.data_ptr()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("longest", [0, LONGEST_SHARED_ROW])
def test_a_frozen_copy_stays_as_it_was(tmp_path: Path, dtype: torch.dtype, bound: float, longest: int) -> None:
    policy = CausalPolicy.of(load_causal_lm(write_model("qwen3", tmp_path)))
    batch = laid_out(ragged_sequences(), longest)
    frozen = policy.frozen(dtype)
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {dtype}
    with torch.no_grad():
        before = policy.distributions(batch, 1.0).logprobs
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
        kept = frozen.distributions(batch, 1.0).logprobs
        moved = policy.distributions(batch, 1.0).logprobs
        frozen.copy_from(policy)
        followed = frozen.distributions(batch, 1.0).logprobs
    assert not kept.requires_grad
    assert (kept - before).abs().max() < bound < (moved - before).abs().max()
    assert (followed - moved).abs().max() < bound * 3
