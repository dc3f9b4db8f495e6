"""The log-probs that a trainer computes: transformers' own forward pass over prompt and response, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class TrainerModel:
    """The shipped model with whatever weights."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(directory, dtype=torch.float32).eval()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These weights from now on."""
        left = self._model.load_state_dict(dict(tensors), strict=False)
        assert not left.unexpected_keys
        self._model.tie_weights()

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        """Of each token of the response."""
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = self._model(input_ids=ids).logits[0].float() / temperature
        every = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        chosen: list[float] = every.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        return chosen
