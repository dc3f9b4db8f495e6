"""What `model.generate` of transformers makes of the same requests: the yardstick of `paceline bench engine`.

Law: both sides do the same work. Lengths are forced in generate without the processors that would slow it down: no
token ends a text, so a batch runs until its longest response is done, as generate does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.core.errors import ConfigError
from paceline.engine.model_loading import quiet_transformers


class GenerateReference:
    """A model of a Hugging Face directory in float32, with its default attention.

    Raises:
        ConfigError: the directory has no weights, or the model cannot generate.
    """

    def __init__(self, path: str) -> None:
        load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
        with quiet_transformers():
            try:
                self._model = load(path, dtype="float32", local_files_only=True)
            except OSError as error:
                raise ConfigError(f"{path} has no weights that can be loaded: {error}") from error
        self._model.train(False)
        options = copy.deepcopy(self._model.generation_config)
        if options is None:
            raise ConfigError(f"{type(self._model).__name__} cannot generate")
        options.eos_token_id = None
        options.pad_token_id = 0
        options.do_sample = False
        options.temperature = options.top_p = options.top_k = None
        self._model.generation_config = options

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.config.get_text_config().vocab_size)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by every name, to be bound to an engine: both sides read the same memory."""
        return dict(self._model.state_dict())

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], batch_size: int) -> list[list[int]]:
        """Greedy responses of the wanted lengths, in batches of `batch_size`, each run to its longest response.

        Args:
            prompts: token ids, all of one length, so that nothing is padded.
        """
        run = cast("Callable[..., torch.Tensor]", self._model.generate)
        responses: list[list[int]] = []
        for start in range(0, len(prompts), batch_size):
            wanted = lengths[start : start + batch_size]
            ids = torch.tensor([list(prompt) for prompt in prompts[start : start + batch_size]])
            made = run(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(wanted))
            new = made[:, ids.shape[1] :].tolist()
            responses += [tokens[:length] for tokens, length in zip(new, wanted, strict=True)]
        return responses
