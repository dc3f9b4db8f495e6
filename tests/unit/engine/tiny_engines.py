"""Random models of three families, engines that serve them, and the slow truth to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.engine.embedded_engine import EmbeddedEngine

VOCAB = 60
PLACES = 4
MAX_MODEL_LEN = 40


SHARED: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
ROTARY: dict[str, Any] = SHARED | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# gpt2: learned positions; llama: one key head; mistral: sees 9 tokens back; gemma2: bounded scores, mixed windows.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": SHARED | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": ROTARY | {"num_key_value_heads": 1},
    "qwen3": ROTARY | {"tie_word_embeddings": True},
    "mistral": ROTARY | {"sliding_window": 9},
    "gemma2": ROTARY | {"sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
}
# Their attention (or what they have in its place) cannot be replaced: they run by whole forward passes.
WHOLE: dict[str, dict[str, Any]] = {
    "bloom": SHARED | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gptj": SHARED | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "falcon": SHARED | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": SHARED | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def config_of(family: str) -> PreTrainedConfig:
    """A config of the family, small enough for a forward pass of a millisecond."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **(FAMILIES | WHOLE)[family])
    return config


def make_model(family: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """A model whose next token depends on the whole context; its config is written to `directory`."""
    config = config_of(family)
    config.save_pretrained(directory)
    torch.manual_seed(seed)
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    # eager: transformers' sdpa leaves out the bound on scores.
    model = build(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.train(False)
    return model


def make_engine(
    directory: Path, kv_cache: Literal["recompute", "keep"] = "recompute", **options: Any
) -> EmbeddedEngine:
    """An engine for the config in `directory`, without weights."""
    sizes = {"max_num_seqs": PLACES, "max_model_len": MAX_MODEL_LEN, **options}
    return EmbeddedEngine(model_config_dir=str(directory), dtype="float32", kv_cache=kv_cache, **sizes)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + index * 5 % 9 for index in range(count)]
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def request(name: str, prompt: Sequence[int], max_tokens: int = 6, **params: Any) -> GenerationRequest:
    """A request; greedy unless told otherwise."""
    options = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": (), "stop": (), **params}
    return GenerationRequest(name, list(prompt), SamplingParams(max_tokens=max_tokens, **options))


def drain(engine: InferenceEngine, most: int = 500) -> dict[str, Completion]:
    """Step until the engine is empty; completions by request."""
    return {completion.request_id: completion for completions in steps(engine, most) for completion in completions}


def steps(engine: InferenceEngine, most: int = 500) -> Iterator[list[Completion]]:
    """What each step returns, until nothing is left."""
    for _ in range(most):
        yield engine.step()
        if not engine.running and not engine.waiting:
            return
    raise AssertionError(f"not empty after {most} steps")


def greedy_truth(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """What `generate` of transformers makes of the prompt, greedily."""
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    ids = torch.tensor([list(prompt)])
    made = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


def full_logits(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logits that predict each response token, from one forward pass over everything: [response, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *response]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]
