"""Next-token logits by the model's own whole forward pass: for causal LMs whose attention cannot be replaced.

Every step runs all tokens of all sequences again, right-padded: what comes after a token never changes what a causal
model makes of it, whatever its layers are. Nothing is cached, so a swap needs no more than the next step, and a step
costs what its sequences are long; `slot_cache` is the quick way for models that allow it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from paceline.engine.sequence_table import SequenceTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole_logits(model: PreTrainedModel, table: SequenceTable, device: torch.device) -> torch.Tensor:
    """Logits of the newest token of every row in use, [count, vocabulary]."""
    count = table.count
    lengths = torch.from_numpy(table.lengths[:count].copy()).to(device)
    longest = int(lengths.max())
    mask = torch.arange(longest, device=device) < lengths[:, None]
    ids = torch.from_numpy(table.tokens[:count, :longest].copy()).to(device) * mask
    arguments = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
    accepted = inspect.signature(model.forward).parameters
    output = model(**{name: value for name, value in arguments.items() if name in accepted})
    logits: torch.Tensor = output.logits
    return logits[torch.arange(count, device=device), lengths - 1]
