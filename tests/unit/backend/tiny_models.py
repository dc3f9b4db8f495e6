"""Small random causal LMs of several architectures, written as Hugging Face directories for tests of train backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from paceline.core.sample import TrainSequence

# A wide spread of weights, so that distributions differ clearly between contexts.
SHARED: dict[str, Any] = {
    "vocab_size": 32,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROTARY: dict[str, Any] = SHARED | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
# gpt2 has dropout and absolute positions; bloom a bias by distance, and no positions; mistral sees 9 tokens back; lfm2
# mixes neighbours by a convolution that no mask stops; gemma2 caps its logits, cohere and granite scale theirs.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": ROTARY | {"head_dim": 8, "tie_word_embeddings": True},
    "llama": ROTARY | {"tie_word_embeddings": False},
    "gpt2": SHARED | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "bloom": SHARED | {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mistral": ROTARY | {"sliding_window": 9},
    "gemma2": ROTARY | {"head_dim": 8, "sliding_window": 64, "final_logit_softcapping": 3.0},
    "cohere": ROTARY | {"logit_scale": 0.25},
    "granite": ROTARY | {"logits_scaling": 2.0},
    "lfm2": ROTARY | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 1},
}


def write_model(name: str, directory: Path) -> str:
    """Write the named architecture with seeded weights, and a tokenizer file to be copied along."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(7)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name]))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}), encoding="utf-8")
    return str(directory)


def sequence(
    prompt: tuple[int, ...], response: list[int], advantage: float, *, mask: list[int] | None = None
) -> TrainSequence:
    """A sequence whose rollout log-probs are near to those of a flat distribution."""
    rollout = [-3.0 - 0.25 * (token % 3) for token in response]
    return TrainSequence(prompt, response, rollout, mask or [1] * len(response), advantage)


def ragged_sequences() -> list[TrainSequence]:
    """Two groups and a loner: prompts and responses of different lengths, a masked token, a group without advantage."""
    first, second, third = (3, 4, 5, 6), (9, 8), (2, 30, 2, 7, 11, 5)
    return [
        sequence(first, [10, 11, 12], 1.0),
        sequence(first, [10, 13], -0.5),
        sequence(first, [14], 0.75),
        sequence(first, [10, 11, 1, 5, 6], -1.25, mask=[1, 0, 1, 1, 0]),
        sequence(second, [20, 21, 22, 23], 0.0),
        sequence(second, [20, 1], 0.0),
        sequence(third, [17, 18, 19, 1], 0.5),
    ]
