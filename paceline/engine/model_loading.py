"""What an engine takes from a Hugging Face directory: an empty model.

Law: the model is built from its config alone. Its parameters are placeholders without memory until weights are bound;
buffers that no checkpoint holds (rotary frequencies) are computed as usual. `transformers` is imported inside the
functions: it takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _EmptyOnMeta(TorchFunctionMode):
    """Puts what `torch.empty` makes on the meta device; computed tensors stay real."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide advice of transformers that nobody who runs a model here can act on."""
    from transformers.utils import logging as advice

    verbosity, shows_bars = advice.get_verbosity(), advice.is_progress_bar_enabled()
    advice.set_verbosity(logging.ERROR)
    advice.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        advice.set_verbosity(verbosity)
        if shows_bars:
            advice.enable_progress_bar()  # type: ignore[no-untyped-call]


def _checked_directory(path: str) -> Path:
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{path} is not the directory of a Hugging Face model: it has no config.json")
    return directory


def build_skeleton(path: str, dtype: str, attention: str, device: torch.device) -> PreTrainedModel:
    """The causal LM of a Hugging Face directory in eval mode, with parameters that take no memory.

    Args:
        path: directory with `config.json`; weight files are not read.
        dtype: "float32", "bfloat16" or "float16".
        attention: name of an implementation in transformers' AttentionInterface.
        device: where the computed buffers go.

    Raises:
        ConfigError: no config, an unknown architecture or dtype, or a buffer that cannot be computed without weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = _checked_directory(path)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not one of {sorted(DTYPES)}")
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            with _EmptyOnMeta():
                build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
                model = build(config, dtype=DTYPES[dtype], attn_implementation=attention)
        except (ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"{path}: no causal LM can be built from its config: {error}") from error
    kept = model.state_dict().keys()
    lost = [name for name, buffer in model.named_buffers() if name not in kept and buffer.is_meta]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    if lost:
        raise ConfigError(f"{type(model).__name__} has buffers that only a checkpoint could fill: {lost}")
    model.requires_grad_(False)
    model.train(False)
    return model
