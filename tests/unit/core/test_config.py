"""Bad configurations are refused in one line; derived numbers follow the known formulas."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from paceline.core.config import Config, build_config, known_keys
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"rollout": {"temprature": 1}}, "unknown key rollout.temprature; did you mean rollout.temperature?"),
        ({"optim": {"lr": 1}}, "unknown key optim.lr; did you mean actor.optim.lr?"),
        ({"nonsense_xyz": 1}, "unknown key nonsense_xyz"),
        ({"rollout": 3}, "unknown key rollout"),
        ({"rollout": {"n": "x"}}, "rollout.n: input should be a valid integer"),
        ({"rollout": {"n": 1}}, "rollout.n must be at least 2"),
        ({"rollout": {"total_rollout_steps": 8}}, "less than one update needs"),
        ({"async_training": {"staleness_threshold": float("nan")}}, "async_training.staleness_threshold"),
        ({"async_training": {"staleness_threshold": -0.1}}, "async_training.staleness_threshold"),
        ({"actor": {"clip_ratio_low": 1.5}}, "actor.clip_ratio_low"),
        ({"trainer": {"logger": ["carrier-pigeon"]}}, "trainer.logger"),
    ],
)
def test_a_bad_configuration_is_one_clear_line(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(tree)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_derived_numbers() -> None:
    config = build_config(
        {
            "actor": {"ppo_mini_batch_size": 10},
            "async_training": {"require_batches": 2, "staleness_threshold": 0.13, "trigger_parameter_sync_step": 5},
            "rollout": {"total_rollout_steps": 99},
        }
    )
    assert config.required_samples == 20
    assert config.max_required_samples == 113
    assert config.total_steps == 4
    assert config.arenas == 3


def test_sequences_that_keep_their_version_need_one_more_arena() -> None:
    assert build_config({"async_training": {"partial_rollout": False}}).arenas == 4


def test_a_threshold_may_be_text_and_stays_exact() -> None:
    config = build_config({"async_training": {"staleness_threshold": "0.36", "trigger_parameter_sync_step": 5}})
    assert config.max_required_samples == 64 * 136 * 5 // 100


def undescribed(section: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += undescribed(field.annotation, f"{prefix}{name}.")
        elif not field.description:
            found.append(f"{prefix}{name}")
    return found


def test_every_key_has_a_description() -> None:
    assert undescribed(Config, "") == []
    assert "actor.optim.lr" in known_keys()
