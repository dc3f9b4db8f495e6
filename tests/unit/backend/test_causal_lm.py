"""Log-probs in a padded or shared layout are those of each sequence alone, for several architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.backend.causal_lm import (
    LONGEST_SHARED_ROW,
    load_causal_lm,
    log_distributions,
    longest_shared_row,
    token_entropies,
    token_logprobs,
)
from paceline.backend.packing import collate, plan_rows
from paceline.core.errors import ConfigError
from paceline.core.sample import TrainSequence
from tests.unit.backend.tiny_models import ragged_sequences, write_model


@torch.no_grad()
def alone(model: PreTrainedModel, sequence: TrainSequence, temperature: float) -> Tensor:
    """Log-probs over the vocabulary [R, V] from a forward of this sequence alone."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return (logits[len(sequence.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "bloom", "mistral", "lfm2"])
@pytest.mark.parametrize("sharing", ["own rows", "shared rows"])
def test_logprobs_and_entropies_are_those_of_the_sequence_alone(
    tmp_path: Path, name: str, temperature: float, sharing: str
) -> None:
    model = load_causal_lm(write_model(name, tmp_path))
    sequences = ragged_sequences()
    longest = longest_shared_row(model) if sharing == "shared rows" else 0
    rows = plan_rows(sequences, range(len(sequences)), longest)
    batch = collate(rows, sequences, [1.0] * len(sequences))
    with torch.no_grad():
        log_distribution, which = log_distributions(model, batch, temperature)
    expected = torch.cat([alone(model, sequences[index], temperature) for row in rows for index in row.members])
    logprobs = token_logprobs(log_distribution, which, batch.targets)
    torch.testing.assert_close(logprobs, expected.gather(1, batch.targets[:, None])[:, 0], rtol=0, atol=1e-5)
    entropies = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(token_entropies(log_distribution, which), entropies, rtol=0, atol=1e-5)


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
    assert longest_shared_row(load_causal_lm(write_model(name, tmp_path))) == longest


def test_a_shared_row_is_no_longer_than_the_window(tmp_path: Path) -> None:
    assert longest_shared_row(load_causal_lm(write_model("mistral", tmp_path))) == 9


class WholeLogits(torch.nn.Module):
    """A causal LM that cannot leave columns out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, use_cache: bool) -> object:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


def test_a_model_that_makes_all_logits_gives_the_same(tmp_path: Path) -> None:
    model = load_causal_lm(write_model("qwen3", tmp_path))
    sequences = ragged_sequences()[:4]
    batch = collate(plan_rows(sequences, range(4), 0), sequences, [1.0] * 4)
    with torch.no_grad():
        few, which = log_distributions(model, batch, 1.0)
        whole, same = log_distributions(cast("PreTrainedModel", WholeLogits(model)), batch, 1.0)
    assert torch.equal(which, same)
    torch.testing.assert_close(whole, few, rtol=0, atol=1e-5)


def test_entropy_of_an_impossible_token_is_not_nan() -> None:
    log_distribution = torch.tensor([[0.5, 0.5, 0.0]]).log()
    entropy = token_entropies(log_distribution, torch.tensor([0]))
    assert entropy.item() == pytest.approx(torch.tensor(2.0).log().item())


def test_weights_are_float32_and_dropout_is_off(tmp_path: Path) -> None:
    model = load_causal_lm(write_model("gpt2", tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


def test_no_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no Hugging Face model in .*config\.json is missing"):
        load_causal_lm(str(tmp_path / "nowhere"))


def test_a_model_without_its_weights_is_refused(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^model\.path: cannot load") as caught:
        load_causal_lm(path)
    assert "\n" not in caught.value.message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = write_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no weights for model\.layers\.2\.input_layernorm\.weight"):
        load_causal_lm(path)
