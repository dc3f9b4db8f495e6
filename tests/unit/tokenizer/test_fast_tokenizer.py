"""Encoding, decoding and end ids from a model directory, without torch or transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from paceline.core.errors import ConfigError
from paceline.tokenizer.fast_tokenizer import FastTokenizer

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, BOS, *"0123456789+-="])}


def write(
    directory: Path, config: dict[str, object], generation: dict[str, object] | None = None, prefix: str = ""
) -> str:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, BOS])
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A", special_tokens=[(prefix, VOCABULARY[prefix])]
        )
    # What another user of the file may have left in it must not cut or fill prompts.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return str(directory)


def test_text_to_ids_and_back(tmp_path: Path) -> None:
    tokenizer = FastTokenizer(write(tmp_path, {"eos_token_id": 1, "pad_token_id": 0}))
    ids = tokenizer.encode("47+85=")
    assert ids == [VOCABULARY[character] for character in "47+85="]
    assert tokenizer.decode(ids) == "47+85="
    assert tokenizer.decode([*tokenizer.encode("132"), 1, 0, 0]) == "132"
    assert tokenizer.decode([]) == ""
    assert tokenizer.vocab_size == len(VOCABULARY)


def test_a_text_gets_the_special_tokens_of_its_model(tmp_path: Path) -> None:
    tokenizer = FastTokenizer(write(tmp_path, {"eos_token_id": 1}, prefix=BOS))
    assert tokenizer.encode("12") == [VOCABULARY[BOS], VOCABULARY["1"], VOCABULARY["2"]]


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids", "pad_id"),
    [
        ({"eos_token_id": 1, "pad_token_id": 0}, None, (1,), 0),
        ({"eos_token_id": 1, "pad_token_id": 0}, {"eos_token_id": [1, 2]}, (1, 2), 0),
        ({"eos_token_id": [2, 1]}, {"eos_token_id": None, "pad_token_id": None}, (2, 1), 2),
        ({}, {"eos_token_id": 2, "pad_token_id": 1}, (2,), 1),
    ],
)
def test_end_and_padding_ids(
    tmp_path: Path,
    config: dict[str, object],
    generation: dict[str, object] | None,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> None:
    tokenizer = FastTokenizer(write(tmp_path, config, generation))
    assert (tokenizer.eos_ids, tokenizer.pad_id) == (eos_ids, pad_id)


def test_what_is_missing_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        FastTokenizer(str(tmp_path))
    write(tmp_path, {})
    with pytest.raises(ConfigError, match="names no eos_token_id"):
        FastTokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON object"):
        FastTokenizer(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        FastTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        FastTokenizer(str(tmp_path))


def test_it_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, paceline.tokenizer.fast_tokenizer, paceline.rollout.prompt_dataset, paceline.algo.advantage, "
        "paceline.reward.arithmetic_reward\n"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
