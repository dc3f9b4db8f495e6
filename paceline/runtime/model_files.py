"""How large the weights of a run are, known from the headers of the model's files alone."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import ConfigError

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}


def count_elements(directory: Path) -> int:
    """Elements of all tensors in the model's safetensors files; only their headers are read.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {directory} has no *.safetensors file")
    elements = 0
    for file in files:
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
