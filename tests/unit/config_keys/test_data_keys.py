"""Keys of the prompts: files, fields, templates, lengths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.core.config import Config
from paceline.core.errors import ConfigError
from paceline.core.ports import PromptSource
from paceline.core.sample import Prompt
from paceline.runtime import registry, task_parts
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.dataset.files import sum_row, write_jsonl

TEMPLATE = "{% if formal %}please {% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"


def source_of(config: Config) -> PromptSource:
    directory = registry.model_path(config)
    return task_parts.build_prompts(config, task_parts.build_renderer(config, FastTokenizer(str(directory)), directory))


def drawn(settings: dict[str, object], count: int) -> list[Prompt]:
    source = source_of(config_with(settings))
    return [prompt for _ in range(count) if (prompt := source.next_prompt()) is not None]


@shows("data.train_files")
def test_training_prompts_come_from_the_files(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [sum_row(0), sum_row(1)])
    two = write_jsonl(tmp_path / "two.jsonl", [sum_row(2)])
    for files in ([str(one), str(two)], str(one)):
        texts = {"0+1=", "1+1=", "2+1="} if isinstance(files, list) else {"0+1=", "1+1="}
        assert {prompt.text for prompt in drawn({"data.train_files": files}, 6)} == texts
    assert drawn({}, 1)[0].data_source == "arithmetic"


@shows("data.val_files", "data.val_max_samples")
def test_validation_prompts_come_from_the_files(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [sum_row(0), sum_row(1), sum_row(2)])
    two = write_jsonl(tmp_path / "two.jsonl", [sum_row(3, data_source="other")])

    def validated(settings: dict[str, object]) -> list[str]:
        return [prompt.text for prompt in source_of(config_with(settings)).validation_prompts()]

    files = [str(one), str(two)]
    assert validated({"data.val_files": files}) == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert validated({"data.val_files": files, "data.val_max_samples": 2}) == ["0+1=", "1+1=", "3+1="]
    assert validated({"data.train_files": str(two)}) == []
    assert len(validated({"data.val_size": 9})) == 9
    with pytest.raises(ConfigError, match=r"data\.val_max_samples: has to be -1"):
        config_with({"data.val_max_samples": 0})


@shows("data.prompt_key")
def test_the_prompt_is_found_under_its_key(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [sum_row(0, question="9+9=")]))
    assert drawn({"data.train_files": file}, 1)[0].text == "0+1="
    assert drawn({"data.train_files": file, "data.prompt_key": "question"}, 1)[0].text == "9+9="


@shows("data.apply_chat_template_kwargs")
def test_the_template_gets_its_arguments(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(registry.model_path(config_with({})), model)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    file = str(write_jsonl(tmp_path / "rows.jsonl", [sum_row(0, prompt=[{"role": "user", "content": "1+1"}])]))
    settings: dict[str, object] = {"model.path": str(model), "data.train_files": file}
    assert drawn(settings, 1)[0].text == "1+1"
    formal: dict[str, object] = {**settings, "data.apply_chat_template_kwargs": {"formal": True}}
    assert drawn(formal, 1)[0].text == "please 1+1"


@shows("data.truncation")
def test_what_becomes_of_a_longer_prompt(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [sum_row(0, prompt="123456")]))
    settings: dict[str, object] = {"data.train_files": file, "data.val_files": file, "data.max_prompt_length": 4}
    settings["reward.name"] = "arithmetic"

    def tokens(truncation: str) -> tuple[int, ...]:
        return drawn({**settings, "data.truncation": truncation}, 1)[0].token_ids

    whole = drawn({**settings, "data.max_prompt_length": 6}, 1)[0].token_ids
    assert tokens("left") == whole[-4:]
    assert tokens("right") == whole[:4]
    assert not source_of(config_with({**settings, "data.truncation": "filter"})).validation_prompts()
    with pytest.raises(
        ConfigError, match=r"all of the 1 prompts that begin with .*rows\.jsonl:1 have more than 4 tokens"
    ):
        task_parts.check_task(config_with({**settings, "data.truncation": "filter"}))
    mixed = str(write_jsonl(tmp_path / "mixed.jsonl", [sum_row(0, prompt="123456"), sum_row(1)]))
    files: dict[str, object] = {**settings, "data.train_files": mixed, "data.val_files": mixed}
    task_parts.check_task(config_with({**files, "data.truncation": "filter"}))
    assert len(source_of(config_with({**files, "data.truncation": "filter"})).validation_prompts()) == 1
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length: .*rows\.jsonl:1 has 6 tokens, more than 4"):
        task_parts.check_task(config_with(settings))


def test_a_mapping_of_the_users_own_may_have_any_keys() -> None:
    config = config_with({"data.apply_chat_template_kwargs": {"a": {"b": 1}}})
    assert json.dumps(config.data.apply_chat_template_kwargs) == '{"a": {"b": 1}}'
