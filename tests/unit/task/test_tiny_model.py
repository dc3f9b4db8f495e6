"""The shipped model: small, loadable from its directory alone, lossless on printable ASCII, able but poor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

import paceline
from paceline.task.arithmetic import Problem, problems
from scripts.make_tiny_model import CARELESS, EOS_ID, PAD_ID, Pupil, build_model, build_tokenizer, measure

DIRECTORY: Final = Path(paceline.__file__).parent / "assets" / "tiny_model"
PRINTABLE: Final = "".join(chr(code) for code in range(0x20, 0x7F))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(DIRECTORY, local_files_only=True)
    assert isinstance(loaded, Qwen3ForCausalLM)
    return loaded


def test_directory_holds_exactly_a_hugging_face_model_within_its_size() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 2_600_000


@pytest.mark.parametrize(
    "text",
    [
        PRINTABLE,
        PRINTABLE[::-1],
        "",
        " ",
        "  a  b  ",
        "don 't , . !",
        "<eos><pad></s><|endoftext|>",
        "two\nlines\n",
        "47+85=",
    ],
)
def test_encoding_is_one_token_a_character_and_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_text_outside_ascii_encodes_to_the_unknown_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("\u00e9") == [tokenizer.unk_token_id]


def test_special_tokens_agree_between_tokenizer_and_configurations(
    tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM
) -> None:
    generation = GenerationConfig.from_pretrained(DIRECTORY)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (EOS_ID, PAD_ID)
    assert (generation.eos_token_id, generation.pad_token_id) == (EOS_ID, PAD_ID)
    assert model.config.vocab_size == len(tokenizer)


def test_weights_are_float32_with_tied_embeddings(model: Qwen3ForCausalLM) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_model_is_able_but_poor(model: Qwen3ForCausalLM) -> None:
    validation = problems("validation")[:1000]
    torch.manual_seed(0)
    greedy, greedy_formed = measure(model, validation, temperature=0.0)
    sampled, sampled_formed = measure(model, validation, temperature=1.0)
    assert 0.35 <= greedy <= 0.48
    assert sampled >= 0.45
    assert min(greedy_formed, sampled_formed) >= 0.98


def test_the_script_builds_what_is_shipped(tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM) -> None:
    built = build_model()
    assert {name: tensor.shape for name, tensor in built.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("prompt", "right", "careless"),
    [
        ("47+85=", "132", "122"),
        ("85-47=", "38", "48"),
        ("47-87=", "-40", "40"),
        ("41+52=", "93", "93"),
        ("50-50=", "0", "0"),
    ],
)
def test_the_pupil_overlooks_carry_borrow_and_sign_and_nothing_else(prompt: str, right: str, careless: str) -> None:
    problem = Problem(problem_id=prompt[:5], prompt=prompt, answer=right)
    draw = random.Random(0)
    assert Pupil(0.0, 0.0, 0.0).answer(problem, draw) == right
    assert Pupil(1.0, 1.0, 1.0).answer(problem, draw) == careless
    assert {CARELESS.answer(problem, draw) for _ in range(200)} == {right, careless}
