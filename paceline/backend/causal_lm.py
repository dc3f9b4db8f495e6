"""Hugging Face causal LMs on disk: load one with float32 weights, write one back.

Any local directory will do: one file or shards, float32 or bfloat16, tied or untied embeddings, with or without a
padding token. Law: every weight that the architecture has came from the directory, or the model is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def load_causal_lm(model_path: str) -> PreTrainedModel:
    """The model in float32, dropout off, gradients on.

    Raises:
        ConfigError: the directory is missing, is no causal LM, or lacks weights that the architecture has.
    """
    if not Path(model_path, "config.json").is_file():
        raise ConfigError(f"model.path: no Hugging Face model in {model_path!r} (config.json is missing)")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = AutoModelForCausalLM.from_pretrained  # its annotation knows no loading report
    try:
        model, report = load(model_path, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.path: cannot load {model_path!r}: {reason}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"model.path: {model_path!r} has no weights for {', '.join(missing)}")
    model.eval()
    loaded: PreTrainedModel = model
    return loaded


def save_causal_lm(model: PreTrainedModel, model_path: str, directory: str) -> None:
    """Write weights, configuration and the tokenizer files of `model_path` to `directory`, which is made if needed."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        source = Path(model_path, name)
        if source.is_file() and source.resolve() != (target / name).resolve():
            shutil.copyfile(source, target / name)
