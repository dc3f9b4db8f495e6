"""From rows to prompts: the schema, the ids, truncation, and errors that name the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, PromptError
from paceline.dataset.opening import open_file
from paceline.dataset.prompt_rows import PromptRows, Truncation, check
from tests.unit.dataset.files import sum_row, write_jsonl

CHAT = [{"role": "user", "content": "47"}]


class Letters:
    """A chat is the texts of its messages; every character is a token."""

    def render(self, prompt: Sequence[Mapping[str, str]] | str) -> tuple[str, list[int]]:
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        if text == "refused":
            raise ValueError("no template takes it")
        return text, [ord(character) for character in text]


def prompts_of(
    tmp_path: Path, rows: Sequence[Mapping[str, Any]], truncation: Truncation = "error", key: str = "prompt"
) -> PromptRows:
    half = len(rows) // 2
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows[:half]), ("b", rows[half:]))]
    parts = [open_file(path, key) for path in paths if path.stat().st_size]
    return PromptRows(parts, renderer=Letters(), prompt_key=key, longest=5, truncation=truncation)


def test_prompts_of_several_files_follow_each_other(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [sum_row(index) for index in range(5)])
    assert len(prompts) == 5
    found = [prompts[place] for place in range(5)]
    assert [prompt.text for prompt in found] == ["0+1=", "1+1=", "2+1=", "3+1=", "4+1="]
    lines = ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]
    assert [prompt.prompt_id for prompt in found] == [f"{tmp_path}/{line}" for line in lines]
    assert (found[3].ground_truth, found[3].data_source, found[3].extra_info) == ("4", "sums", {"index": 3})
    for place in (-1, 5):
        with pytest.raises(IndexError):
            prompts[place]


@pytest.mark.parametrize("truth", ["4", 4, 4.5, None, [1, 2], {"a": 1}])
def test_a_ground_truth_is_of_any_kind(tmp_path: Path, truth: object) -> None:
    rows = [sum_row(0, reward_model={"ground_truth": truth}), sum_row(1, extra_info=None)]
    prompts = prompts_of(tmp_path, rows)
    assert prompts[0].ground_truth == truth
    assert prompts[1].extra_info == {}


def test_the_prompt_is_found_under_its_key(tmp_path: Path) -> None:
    row = sum_row(0, prompt=None, question=CHAT)
    assert prompts_of(tmp_path, [row], key="question")[0].text == "47"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"prompt": None}, "has no 'prompt' (data.prompt_key names the field; the row has data_source, extra_info"),
        ({"prompt": 5}, "'prompt' is neither a text nor a list of messages"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": []}, "'prompt' is neither a text nor a list of messages"),
        ({"prompt": ["47"]}, "'prompt' has a message without a role and a content that are texts"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "'prompt' has a message without"),
        ({"data_source": None}, "has no data_source that is a text"),
        ({"reward_model": None}, "has no reward_model.ground_truth (null is one"),
        ({"reward_model": {"style": "rule"}}, "has no reward_model.ground_truth (null is one"),
        ({"extra_info": "x"}, "extra_info is str, not an object"),
        ({"extra_info": {"a": 1 << 70}}, "ground_truth or extra_info holds what cannot be handed on: "),
        ({"prompt": "refused"}, "no template takes it"),
    ],
)
def test_a_bad_row_is_named_with_its_fault(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    prompts = prompts_of(tmp_path, [sum_row(0), sum_row(1), sum_row(2), sum_row(3, **changed)])
    with pytest.raises(PromptError) as caught:
        prompts[3]
    assert caught.value.prompt_id == f"{tmp_path}/b.jsonl:2"
    assert caught.value.message.startswith(f"{tmp_path}/b.jsonl:2: {line}")
    with pytest.raises(ConfigError) as refused:
        check(prompts, longest=5, truncation="error", whole=10, rendered=10)
    assert refused.value.message == caught.value.message
    check(prompts, longest=5, truncation="error", whole=3, rendered=3)  # what is beyond costs its own sample
    assert prompts[2].text == "2+1="


def test_a_prompt_without_tokens_is_named(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [sum_row(0, prompt=[{"role": "user", "content": ""}])])
    with pytest.raises(PromptError, match=r"b\.jsonl:1: the prompt has no tokens"):
        prompts[0]


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", "45678"), ("right", "12345"), ("filter", "12345678"), ("error", "12345678")]
)
def test_longer_prompts_are_cut_or_left_to_be_refused(tmp_path: Path, truncation: Truncation, kept: str) -> None:
    prompts = prompts_of(tmp_path, [sum_row(0, prompt="12345678")], truncation)
    assert "".join(map(chr, prompts[0].token_ids)) == kept
    if truncation == "error":
        with pytest.raises(
            ConfigError, match=r"data\.max_prompt_length: .*b\.jsonl:1 has 8 tokens, more than 5; raise"
        ):
            check(prompts, longest=5, truncation=truncation, whole=1, rendered=1)
    elif truncation == "filter":
        with pytest.raises(
            ConfigError, match=r"all of the 1 prompts that begin with .*b\.jsonl:1 have more than 5 tokens"
        ):
            check(prompts, longest=5, truncation=truncation, whole=1, rendered=1)
        mixed = prompts_of(tmp_path, [sum_row(0, prompt="12345678"), sum_row(1, prompt="12345")], truncation)
        check(mixed, longest=5, truncation=truncation, whole=2, rendered=2)
    else:
        check(prompts, longest=5, truncation=truncation, whole=1, rendered=1)
