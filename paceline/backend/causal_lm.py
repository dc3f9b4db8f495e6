"""Hugging Face causal LMs as a train backend uses them: load, log-probs of response tokens, write back.

Law: the model's own forward makes the logits (whatever scaling or capping it has is kept), only at the columns that
predict response tokens where the model can leave the others out, and dropout is off: log-probs are those of the
distribution that a replica samples from.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from paceline.backend.packing import MicroBatch, collate, plan_rows
from paceline.core.errors import ConfigError
from paceline.core.sample import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bounds the memory of the mask of a shared row: 4 bytes times this, per token.
LONGEST_SHARED_ROW: Final = 2048
# Keys under which configurations keep a distance beyond which a token is not seen; a mask of our own would override it.
WINDOW_KEYS: Final = ("sliding_window", "attention_chunk_size", "window_size")
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
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Any = AutoModelForCausalLM.from_pretrained  # its annotation knows no loading report
    try:
        model, report = load(model_path, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
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


def log_distributions(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs over the vocabulary at the columns that predict response tokens.

    Returns:
        A float32 tensor [M, V], and an int64 tensor [N] that says which of its rows predicts each response token
        (responses of one row share the one that predicts their first token).
    """
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    columns = batch.input_ids.shape[1] - batch.first_column
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = columns
    logits = model(**inputs).logits[:, -columns:].float()
    if temperature != 1.0:
        logits = logits / temperature
    which = batch.rows * columns + (batch.columns - batch.first_column)
    return logits.log_softmax(-1).flatten(0, 1), which


def token_logprobs(log_distribution: Tensor, which: Tensor, targets: Tensor) -> Tensor:
    """Log-prob of each target, [N]; arguments as `log_distributions` gives them."""
    return log_distribution.flatten().index_select(0, which * log_distribution.shape[1] + targets)


def token_entropies(log_distribution: Tensor, which: Tensor) -> Tensor:
    """Entropy in nats of the distribution that each response token was drawn from, [N]."""
    lowest = torch.finfo(log_distribution.dtype).min
    entropies = -(log_distribution.exp() * log_distribution.clamp_min(lowest)).sum(-1)
    return entropies.index_select(0, which)


def longest_shared_row(model: PreTrainedModel) -> int:
    """Most tokens of a row that several responses may share with this model; 0 when it takes no such rows.

    Not every architecture takes a mask and positions of our own (recurrent layers, position biases), so it is tried:
    the log-probs of two responses in one row must be those of two rows.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return 0
    try:
        agrees = torch.allclose(_probe(model, LONGEST_SHARED_ROW), _probe(model, 0), rtol=1e-5, atol=1e-5)
    except Exception:  # a library may refuse the layout in any way it likes; each of them means that it cannot be used
        return 0
    settings = model.config.get_text_config().to_dict()
    windows = [settings[key] for key in WINDOW_KEYS if isinstance(settings.get(key), int)]
    return min([LONGEST_SHARED_ROW, *windows]) if agrees else 0


@torch.no_grad()
def _probe(model: PreTrainedModel, longest: int) -> Tensor:
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = [(7 * number + 3) % vocabulary for number in range(14)]
    sequences = [TrainSequence(tuple(ids[:4]), response, [0.0] * 5, [1] * 5, 0.0) for response in (ids[4:9], ids[9:14])]
    batch = collate(plan_rows(sequences, (0, 1), longest), sequences, (1.0, 1.0))
    log_distribution, which = log_distributions(model, batch, 1.0)
    return token_logprobs(log_distribution, which, batch.targets)
