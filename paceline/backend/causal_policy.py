"""A causal LM as a policy: log-probs and entropies of response tokens, and frozen copies of it.

Law: log-probs are those of the distribution that a replica samples from: the model's own scaling and capping of logits
is kept and dropout is off. Logits are made block by block where the model's head can be taken apart (`logit_head`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from paceline.algo.linear_logprobs import linear_logprobs
from paceline.backend.logit_head import LogitHead, find_logit_head
from paceline.backend.packing import MicroBatch, collate, plan_rows
from paceline.core.sample import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Bounds the memory of the mask of a shared row: 4 bytes times this, per token.
LONGEST_SHARED_ROW: Final = 2048
# Keys under which configurations keep a distance beyond which a token is not seen; a mask of our own would override it.
WINDOW_KEYS: Final = ("sliding_window", "attention_chunk_size", "window_size")


@dataclass(frozen=True, slots=True)
class TokenDistributions:
    """Of each response token [N], in nats: its log-prob, and the entropy of the distribution it was drawn from."""

    logprobs: Tensor
    entropies: Tensor


class CausalPolicy:
    """A model in eval mode and what was found out about it."""

    def __init__(self, model: PreTrainedModel, head: LogitHead | None) -> None:
        self.model = model
        self._head = head
        self._accepted = inspect.signature(model.forward).parameters

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Takes the model apart, if that can be."""
        return cls(model, find_logit_head(model))

    @property
    def head(self) -> LogitHead | None:
        """None: logits are made all at once, by the model's own forward."""
        return self._head

    def distributions(self, batch: MicroBatch, temperature: float) -> TokenDistributions:
        """Of the micro-batch's response tokens, in its order."""
        if self._head is None:
            return self._by_whole_logits(batch, temperature)
        hidden = self._head.trunk(**self._inputs(batch)).last_hidden_state
        width = hidden.shape[1]
        chosen = hidden.flatten(0, 1).index_select(0, batch.rows * width + batch.columns)
        form = dataclasses.replace(self._head.form, temperature=temperature)
        return TokenDistributions(*linear_logprobs(chosen, self._head.weight, self._head.bias, batch.targets, form))

    def frozen(self, dtype: torch.dtype) -> CausalPolicy:
        """A copy of its own with parameters of this type, that takes no gradient."""
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
        return CausalPolicy(model, None if self._head is None else self._head.of_copy(model))

    @torch.no_grad()
    def copy_from(self, other: CausalPolicy) -> None:
        """Take over the other's parameters, converted to this one's type."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.copy_(theirs)

    def longest_shared_row(self) -> int:
        """Most tokens of a row that several responses may share with this model; 0 when it takes no such rows.

        Not every architecture takes a mask and positions of our own (recurrent layers, position biases), so it is
        tried: the log-probs of two responses in one row must be those of two rows.
        """
        if "position_ids" not in self._accepted:
            return 0
        try:
            agrees = torch.allclose(self._probe(LONGEST_SHARED_ROW), self._probe(0), rtol=1e-5, atol=1e-5)
        except Exception:  # a library may refuse the layout in any way it likes; each means that it cannot be used
            return 0
        settings = self.model.config.get_text_config().to_dict()
        windows = [settings[key] for key in WINDOW_KEYS if isinstance(settings.get(key), int)]
        return min([LONGEST_SHARED_ROW, *windows]) if agrees else 0

    @torch.no_grad()
    def _probe(self, longest: int) -> Tensor:
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        ids = [(7 * number + 3) % vocabulary for number in range(14)]
        pair = [TrainSequence(tuple(ids[:4]), response, [0.0] * 5, [1] * 5, 0.0) for response in (ids[4:9], ids[9:14])]
        return self.distributions(collate(plan_rows(pair, (0, 1), longest), pair, (1.0, 1.0)), 1.0).logprobs

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        mask = batch.attention_mask
        if mask is not None and mask.is_floating_point() and mask.dtype != self.model.dtype:
            # The lowest float32 would be -infinity in a narrower type.
            mask = mask.clamp_min(torch.finfo(self.model.dtype).min).to(self.model.dtype)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": mask, "use_cache": False}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        return inputs

    def _by_whole_logits(self, batch: MicroBatch, temperature: float) -> TokenDistributions:
        inputs = self._inputs(batch)
        columns = batch.input_ids.shape[1] - batch.first_column
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = columns
        logits = self.model(**inputs).logits[:, -columns:].float()
        if temperature != 1.0:
            logits = logits / temperature
        which = batch.rows * columns + (batch.columns - batch.first_column)
        log_p = logits.flatten(0, 1).index_select(0, which).log_softmax(-1)
        lowest = torch.finfo(log_p.dtype).min
        return TokenDistributions(
            logprobs=log_p.gather(1, batch.targets[:, None])[:, 0],
            entropies=-(log_p.exp() * log_p.clamp_min(lowest)).sum(-1),
        )
