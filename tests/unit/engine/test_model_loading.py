"""What is read from a model's directory, and what a bad one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.engine.model_loading import build_skeleton
from tests.unit.engine.tiny_engines import make_model

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


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_skeleton(str(tmp_path), "float32", "sdpa", CPU)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="no causal LM can be built"):
        build_skeleton(str(tmp_path), "float32", "sdpa", CPU)
