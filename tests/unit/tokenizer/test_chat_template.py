"""Chats as text, held against what transformers makes of the same templates; prompts without a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.core.errors import ConfigError
from paceline.tokenizer.chat_template import read_chat_template
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from paceline.tokenizer.prompt_renderer import PromptRenderer
from tests.unit.tokenizer.test_fast_tokenizer import BOS, EOS, PAD, write

CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": '1+2 <&> "x"\n'}]
MARKED = (
    "{% for message in messages %}\n"
    "{% if loop.first %}{{ bos_token }}{% endif %}\n"
    "  {% if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)
JSON = "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}"


def model(directory: Path, settings: dict[str, Any], template_file: str | None = None) -> str:
    directory.mkdir(exist_ok=True)
    path = write(directory, {"eos_token_id": 1, "model_type": "llama"}, prefix=BOS)
    tokens = {"bos_token": BOS, "eos_token": {"content": EOS, "__type": "AddedToken"}, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template_file is not None:
        (directory / "chat_template.jinja").write_text(template_file, encoding="utf-8")
    return path


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("template", [MARKED, JSON])
@pytest.mark.parametrize("arguments", [{}, {"thinking": True}, {"bos_token": "0"}])
def test_the_text_is_that_of_transformers(
    tmp_path: Path, template: str, arguments: dict[str, Any], in_file: bool
) -> None:
    path = model(tmp_path / "m", {} if in_file else {"chat_template": template}, template if in_file else None)
    theirs: Any = AutoTokenizer.from_pretrained(path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **arguments)
    renderer = PromptRenderer(FastTokenizer(path), read_chat_template(Path(path), arguments))
    text, token_ids = renderer.render(CHAT)
    assert renderer.takes_chats
    assert text == expected
    assert token_ids == theirs(expected, add_special_tokens=False)["input_ids"]


def test_a_text_is_used_as_it_is_with_or_without_a_template(tmp_path: Path) -> None:
    for name, settings in (("chat", {"chat_template": MARKED}), ("base", {})):
        path = model(tmp_path / name, settings)
        tokenizer = FastTokenizer(path)
        renderer = PromptRenderer(tokenizer, read_chat_template(Path(path), {}))
        assert renderer.takes_chats == (name == "chat")
        assert renderer.render("1+2=") == ("1+2=", tokenizer.encode("1+2="))
        assert tokenizer.encode("1")[0] == 2  # the BOS that the tokenizer puts before texts


def test_a_chat_for_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    path = model(tmp_path, {})
    with pytest.raises(ValueError, match="no chat template: use plain texts as prompts, or a model that has one"):
        PromptRenderer(FastTokenizer(path), read_chat_template(Path(path), {})).render(CHAT)


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = read_chat_template(Path(model(tmp_path, {"chat_template": several})), {})
    assert template is not None
    assert template.render(CHAT) == "plain"


def test_what_a_template_refuses_is_an_error_of_that_chat(tmp_path: Path) -> None:
    template = read_chat_template(Path(model(tmp_path, {"chat_template": "{{ raise_exception('no system') }}"})), {})
    assert template is not None
    with pytest.raises(ValueError, match="does not take it: no system"):
        template.render(CHAT)


def test_a_broken_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        read_chat_template(Path(model(tmp_path, {"chat_template": "{% if %}"})), {})
