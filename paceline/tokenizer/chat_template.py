"""The chat template of a Hugging Face model directory, rendered by Jinja2 alone.

Law: the text is the one that `apply_chat_template(..., add_generation_prompt=True)` of transformers gives, whose
environment this follows: sandboxed, blocks trimmed, `tojson`, `raise_exception`, `strftime_now`, loop controls and the
`generation` block, and the tokenizer's special tokens by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import ConfigError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template. `arguments` go to every rendering and before the special tokens of the same name.

    Raises:
        ConfigError: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"model.path: the model's chat template cannot be read: {error}") from error
        self._variables = {"tools": None, "documents": None, **special_tokens, **arguments}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat as text, up to where the answer begins.

        Raises:
            ValueError: the template does not take this chat.
        """
        variables = {"add_generation_prompt": True, **self._variables}
        try:
            return self._template.render(messages=[dict(message) for message in messages], **variables)
        except Exception as error:  # a template is a program of somebody else's and may fail in any way
            raise ValueError(f"the model's chat template does not take it: {error}") from error


def read_chat_template(directory: Path, arguments: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model directory: `chat_template.jinja`, or in `tokenizer_config.json`; None where it has none.

    Raises:
        ConfigError: a file cannot be read, or is no template.
    """
    settings = _read_settings(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else _chosen(settings.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
    if source is None:
        return None
    named = {name: _token_text(settings.get(name)) for name in SPECIAL_TOKENS}
    return ChatTemplate(source, {name: text for name, text in named.items() if text is not None}, arguments)


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _chosen(value: object) -> str | None:
    """One template, or the one called `default` of several."""
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}.get("default")
    elif isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks what the assistant says; rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
