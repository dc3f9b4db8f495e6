"""What a run trains on: paths, places, scorers, and what is checked before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from paceline.core.checkpoint import sampling_settings
from paceline.core.errors import ConfigError
from paceline.core.events import PromptRefused
from paceline.core.ports import PromptSource
from paceline.reward.arithmetic_reward import ArithmeticReward
from paceline.rollout.usable_prompts import UsablePrompts
from paceline.runtime import registry, task_parts
from paceline.testing.recording import RecordingEvents
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from tests.unit.config_keys.keys import config_with
from tests.unit.dataset.files import sum_row, write_jsonl

GYM = "reasoning_gym:chain_sum?max_terms=2"


def source_of(settings: dict[str, object], spill_dir: Path | None = None) -> PromptSource:
    config = config_with(settings)
    directory = registry.model_path(config)
    renderer = task_parts.build_renderer(config, FastTokenizer(str(directory)), directory)
    return task_parts.build_prompts(config, renderer, spill_dir)


def ids(source: PromptSource, count: int) -> list[str]:
    return [prompt.prompt_id for _ in range(count) if (prompt := source.next_prompt()) is not None]


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"data.train_files": ["a.jsonl", GYM], "data.val_files": "/b.parquet"}
    config = task_parts.settle_paths(config_with({**settings, "reward.custom_reward_function.path": "judge.py"}))
    assert config.data.train_files == (str(tmp_path / "a.jsonl"), GYM)
    assert config.data.val_files == ("/b.parquet",)
    assert config.reward.custom_reward_function.path == str(tmp_path / "judge.py")
    assert task_parts.settle_paths(config_with({})) == config_with({})


@pytest.mark.parametrize("given", [0, 3, 7, 8])
def test_prompts_of_a_file_go_on_where_they_stood(tmp_path: Path, given: int) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [sum_row(index) for index in range(7)]))
    settings: dict[str, object] = {"data.train_files": file}
    source = source_of(settings)
    ids(source, given)
    resumed = source_of(settings)
    task_parts.restore_prompts(resumed, msgspec.msgpack.encode(source.state()))
    assert ids(resumed, 20) == ids(source, 20)
    write_jsonl(Path(file), [sum_row(0)])
    with pytest.raises(ConfigError, match="the cursor is of 7 prompts with seed 0, the data set has 1"):
        task_parts.restore_prompts(source_of(settings), msgspec.msgpack.encode(source.state()))


@pytest.mark.parametrize(
    ("settings", "scorer"),
    [
        ({}, "arithmetic"),
        ({"data.train_files": GYM}, "reasoning_gym"),
        ({"data.train_files": [GYM, GYM], "data.val_files": GYM}, "reasoning_gym"),
        ({"data.train_files": "a.jsonl", "reward.name": "math_verify"}, "math_verify"),
        ({"data.train_files": "a.jsonl", "reward.custom_reward_function.path": "a.py"}, None),
        ({"data.train_files": GYM, "reward.custom_reward_function.path": "a.py"}, None),
    ],
)
def test_the_scorer_that_counts(settings: dict[str, object], scorer: str | None) -> None:
    assert task_parts.scorer_of(config_with(settings)) == scorer


@pytest.mark.parametrize(
    "settings",
    [
        {"data.train_files": "a.jsonl"},
        {"data.train_files": [GYM, "a.jsonl"]},
        {"data.val_files": "a.jsonl"},
        {"data.val_files": GYM},
    ],
)
def test_data_without_a_scorer_of_its_own_needs_one(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^reward: no scorer is named .* set reward\.custom_reward_function\.path"):
        task_parts.scorer_of(config_with(settings))


def test_the_embedded_task_is_scored_where_it_is(tmp_path: Path) -> None:
    reward = asyncio.run(task_parts.build_reward(config_with({}), tmp_path / "log"))
    assert isinstance(reward, ArithmeticReward)


def test_what_lies_behind_the_checked_rows_costs_its_own_sample(tmp_path: Path) -> None:
    rows = [sum_row(0), sum_row(1), sum_row(2, prompt="1" * 99), sum_row(3, reward_model=None), sum_row(4)]
    settings: dict[str, object] = {
        "data.train_files": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        "data.val_files": str(write_jsonl(tmp_path / "val.jsonl", rows[:1])),
        "reward.name": "arithmetic",
    }
    task_parts.check_task(config_with(settings), task_parts.Checked(rows=3, prompts=2))
    events = RecordingEvents()
    usable = UsablePrompts(source_of(settings), longest=16, events=events)
    drawn = {prompt.text for _ in range(6) if (prompt := usable.next_prompt()) is not None}
    assert drawn == {"0+1=", "1+1=", "4+1="}
    refused = {event.prompt_id.rpartition("rows.jsonl")[2]: event.reason for event in events.of(PromptRefused)}
    assert refused.keys() >= {":3", ":4"}
    assert "has no reward_model.ground_truth" in refused[":4"]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:4: has no reward_model\.ground_truth"):
        task_parts.check_task(config_with(settings), task_parts.Checked(rows=4, prompts=2))


def test_a_long_validation_prompt_is_refused_wherever_it_is(tmp_path: Path) -> None:
    rows = [*(sum_row(index) for index in range(30)), sum_row(0, prompt="1" * 99)]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:31 has 99 tokens, more than 16"):
        source_of({"data.val_files": file})
    assert len(source_of({"data.val_files": file, "data.truncation": "filter"}).validation_prompts()) == 30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_files", ["b.jsonl"]),
        ("data.prompt_key", "question"),
        ("data.truncation", "left"),
        ("data.apply_chat_template_kwargs", {"thinking": True}),
    ],
)
def test_what_a_prompt_is_must_be_the_same_when_a_run_goes_on(key: str, value: object) -> None:
    before = config_with({"data.train_files": ["a.jsonl"]})
    after = config_with({"data.train_files": ["a.jsonl"], key: value})
    then = msgspec.json.decode(msgspec.json.encode(sampling_settings(before)))
    assert then == sampling_settings(before)
    assert then != sampling_settings(after)
