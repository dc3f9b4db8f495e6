"""The last step of a causal LM taken apart: the trunk that makes hidden states, and the layer that makes logits.

Law: a head is used only if it was tried: on a few tokens its logits are those of the model's own forward. A model that
does something else between trunk and logits has no head here, and its own forward makes all logits at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from paceline.algo.linear_logprobs import LogitForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS: Final = 7
# Under these keys configurations keep what is done to the numbers of the last layer.
SOFTCAP_KEY: Final = "final_logit_softcapping"
SCALE_KEY: Final = "logit_scale"
DIVISOR_KEY: Final = "logits_scaling"


@dataclass(frozen=True, slots=True)
class LogitHead:
    """`trunk(...)` gives `last_hidden_state`; `layer` (weight [V, H], maybe a bias) and `form` make logits of it."""

    trunk: nn.Module
    layer: nn.Module
    form: LogitForm

    @property
    def weight(self) -> Tensor:
        """[V, H]"""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V], None where the layer has none."""
        return getattr(self.layer, "bias", None)

    def of_copy(self, model: PreTrainedModel) -> LogitHead:
        """The head of a copy of the model, whatever type its weights have: not tried again."""
        whole: Any = model
        return LogitHead(whole.base_model, whole.get_output_embeddings(), self.form)


def find_logit_head(model: PreTrainedModel) -> LogitHead | None:
    """The model's head, None where it cannot be taken apart."""
    try:
        return _tried_head(model)
    except Exception:  # models answer an unusual call in any way they like; each of them means: use the whole forward
        return None


@torch.no_grad()
def _tried_head(model: PreTrainedModel) -> LogitHead | None:
    whole: Any = model
    trunk, layer = whole.base_model, whole.get_output_embeddings()
    settings = model.config.get_text_config().to_dict()
    head = LogitHead(trunk, layer, _form(settings))
    vocabulary = int(settings["vocab_size"])
    device = head.weight.device
    ids = torch.tensor([[(5 * number + 2) % vocabulary for number in range(PROBE_TOKENS)]], device=device)
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
    logits = whole(input_ids=ids, use_cache=False).logits
    mine = head.form.logits(nn.functional.linear(hidden, head.weight, head.bias))
    return head if torch.allclose(mine, logits.float(), rtol=1e-4, atol=1e-4) else None


def _form(settings: dict[str, Any]) -> LogitForm:
    scale = float(settings.get(SCALE_KEY) or 1.0) / float(settings.get(DIVISOR_KEY) or 1.0)
    softcap = settings.get(SOFTCAP_KEY)
    return LogitForm(scale=scale, softcap=None if softcap is None else float(softcap))
