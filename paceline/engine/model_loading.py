"""What an engine takes from a Hugging Face directory: an empty model, the tokenizer, the ids that end a text.

Law: the model is built from its config alone. Its parameters are placeholders without memory until weights are bound;
buffers that no checkpoint holds (rotary frequencies) are computed as usual. `transformers` is imported inside the
functions: it takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


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


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory; nothing is looked up on a hub.

    Raises:
        ConfigError: the directory has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    directory = _checked_directory(path)
    # Without a file of its own, transformers makes an empty tokenizer of the model's kind.
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{path} has no usable tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (ValueError, OSError, KeyError) as error:
            raise ConfigError(f"{path} has no usable tokenizer: {error}") from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def load_stop_token_ids(path: str) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of the generation config, else of the config, in order, without repeats.

    Raises:
        ConfigError: neither file names one.
    """
    directory = _checked_directory(path)
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(dict.fromkeys([found] if isinstance(found, int) else found))
    raise ConfigError(f"{path}: neither generation_config.json nor config.json names an eos_token_id")


class HuggingFaceTextDecoder:
    """`TextDecoder` of a Hugging Face tokenizer; special tokens are left out.

    Example: `HuggingFaceTextDecoder(load_tokenizer(path)).decode([14, 20, 2]) == "47"`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, spaces as the tokenizer has them."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)
