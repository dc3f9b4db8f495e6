"""Models on disk: float32 weights whatever the files hold, and one clear line for what is no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.backend.causal_lm import load_causal_lm
from paceline.core.errors import ConfigError
from tests.unit.backend.tiny_models import write_model


def test_weights_are_float32_and_dropout_is_off(tmp_path: Path) -> None:
    model = load_causal_lm(write_model("gpt2", tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_any_type_give_the_weights_of_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_causal_lm(write_model("qwen3", tmp_path / "one"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    loaded = load_causal_lm(str(tmp_path / "shards")).state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].float()) for name in expected)


def test_a_missing_shard_is_one_clear_line(tmp_path: Path) -> None:
    load_causal_lm(write_model("llama", tmp_path / "one")).save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match=r"^model\.path: cannot load") as caught:
        load_causal_lm(str(tmp_path / "shards"))
    assert "\n" not in caught.value.message


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
