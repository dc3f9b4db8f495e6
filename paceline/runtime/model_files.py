"""What can be known of a run's model from its files alone: how large its weights are, and that it can be trained.

Only headers and JSON files are read, so that a wrong model is refused before anything starts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from paceline.core.config import Config
from paceline.core.errors import ConfigError

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Suffixes of classes that predict the next token.
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")


def check_model(config: Config, directory: Path) -> None:
    """Refuse a model that no trainer here can train, as far as its files tell.

    Raises:
        ConfigError: it is no causal LM, it is quantized, its files are not whole, or the run's sequences are longer
            than the model can be.
    """
    settings = _read_json(directory / "config.json")
    kinds = settings.get("architectures") or []
    if kinds and not any(str(kind).endswith(CAUSAL) for kind in kinds):
        raise ConfigError(f"model.path: {directory} holds a {', '.join(map(str, kinds))}, which is no causal LM")
    if settings.get("quantization_config"):
        raise ConfigError(f"model.path: {directory} is quantized; training needs float32, float16 or bfloat16 weights")
    weight_files(directory)
    longest = min((settings[key] for key in LENGTH_KEYS if isinstance(settings.get(key), int)), default=None)
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"data.max_prompt_length and data.max_response_length allow {config.max_model_len} tokens together, but "
            f"the model of model.path={directory} has {longest} positions"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: the one file, or the shards that its index names.

    Raises:
        ConfigError: there is none, or the index names one that is missing.
    """
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    if (directory / INDEX).is_file():
        shards = sorted(set(_read_json(directory / INDEX).get("weight_map", {}).values()))
        missing = [name for name in shards if not (directory / name).is_file()]
        if missing:
            raise ConfigError(f"model.path: {directory} lacks {', '.join(missing)}, which its {INDEX} names")
        return [directory / name for name in shards]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        only_pickles = any(directory.glob("pytorch_model*.bin"))
        hint = "; save it again with save_pretrained, its pytorch_model*.bin are not read" if only_pickles else ""
        raise ConfigError(f"model.path: {directory} has no *.safetensors file{hint}")
    return files


def count_elements(directory: Path) -> int:
    """Elements of all tensors in the model's safetensors files; only their headers are read.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    elements = 0
    for file in weight_files(directory):
        try:
            with safe_open(str(file), framework="numpy") as tensors:
                elements += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    return elements


def weight_bytes(config: Config, directory: Path) -> int:
    """Bytes of one version of the weights as replicas serve them.

    Raises:
        ConfigError: as `count_elements`.
    """
    return count_elements(directory) * BYTES_PER_ELEMENT[config.rollout.dtype]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {file} has to hold a JSON object")
    return content
