"""What is read from a model's directory, and what a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.errors import ConfigError
from paceline.engine.model_loading import HuggingFaceTextDecoder, build_skeleton, load_stop_token_ids, load_tokenizer
from tests.unit.engine.tiny_engines import config_of, make_model

SHIPPED = str(Path(paceline.__file__).parent / "assets" / "tiny_model")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2"])
def test_a_skeleton_takes_no_memory_and_has_real_computed_buffers(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    skeleton = build_skeleton(str(tmp_path), "float32", "sdpa", CPU)
    matrices = [parameter for parameter in skeleton.parameters() if parameter.dim() > 1]
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in matrices)
    assert skeleton.state_dict().keys() == model.state_dict().keys()
    assert not skeleton.training
    computed = dict(skeleton.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(computed[name], buffer)


def test_the_shipped_models_text_survives_a_round_trip() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    ids = tokenizer.encode("47+85=132 ")
    decoder = HuggingFaceTextDecoder(tokenizer)
    assert decoder.decode(ids) == "47+85=132 "
    assert decoder.decode([*ids, *load_stop_token_ids(SHIPPED)]) == "47+85=132 "
    assert decoder.decode([]) == ""


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 3, 5]}, {"eos_token_id": 1}, (5, 3)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": 0}, (0,)),
    ],
)
def test_stop_ids_come_from_the_generation_config_first(
    generation: dict[str, object] | None, config: dict[str, object], expected: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert load_stop_token_ids(str(tmp_path)) == expected


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="no causal LM can be built"):
        build_skeleton(str(tmp_path), "float32", "sdpa", CPU)
    with pytest.raises(ConfigError, match="names an eos_token_id"):
        load_stop_token_ids(str(tmp_path))
    config_of("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(str(tmp_path))
