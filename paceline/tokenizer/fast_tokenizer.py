"""Tokenizer of a Hugging Face model directory on the `tokenizers` library alone: starts in a tenth of a second.

Law: prompts are encoded once, responses are decoded for rewards and people only; no decoded text is encoded again.
The ids that end a response come from the model's own configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.core.errors import ConfigError


class FastTokenizer:
    """Implements `core.ports.TextDecoder` for the `tokenizer.json` of a model directory.

    Raises:
        ConfigError: `tokenizer.json` or `config.json` is missing or cannot be read, or no id ends a response.
    """

    def __init__(self, model_dir: str) -> None:
        directory = Path(model_dir)
        self._tokenizer = _read_tokenizer(directory / "tokenizer.json")
        settings = _read_json(directory / "config.json")
        if (directory / "generation_config.json").is_file():
            chosen = _read_json(directory / "generation_config.json")
            settings = settings | {key: value for key, value in chosen.items() if value is not None}
        self._eos_ids = _as_ids(settings.get("eos_token_id"))
        if not self._eos_ids:
            raise ConfigError(f"model.path: {model_dir!r} names no eos_token_id: a response would never end")
        pad = settings.get("pad_token_id")
        self._pad_id = pad if isinstance(pad, int) else self._eos_ids[0]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response, at least one; generation_config.json goes before config.json."""
        return self._eos_ids

    @property
    def pad_id(self) -> int:
        """Id for padding; the first of `eos_ids` when the model names none."""
        return self._pad_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the model's tokenizer puts around a text (a BOS, say)."""
        return list(self._tokenizer.encode(text).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that holds its special tokens already, as a chat template writes them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(f"model.path: {path} is missing; save the model's fast tokenizer there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"model.path: {path} is no JSON object")
    return settings


def _as_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int))
