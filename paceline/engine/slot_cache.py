"""Keys and values of all sequences, one place (slot) per sequence, and the plan of one forward pass over them.

A forward pass is packed: one row of tokens, first the newest token of each of the sequences 0..n-1, then blocks of
prompts that have no keys and values yet. Each layer writes the keys and values of all of them to their slots, so that
a prompt that several sequences share is computed once and written to each; then the newest tokens attend to their
slots, prompts to themselves.

Law: a slot holds values of one version only, unless the engine's policy is to keep them over a swap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

KEY_LENGTH_STEP = 8

IntArray = npt.NDArray[np.int64]


class PromptBlock(NamedTuple):
    """Prompts of about one length: `tokens` [prompts, longest], `lengths` [prompts], and the slots that share each."""

    tokens: IntArray
    lengths: IntArray
    slots: Sequence[Sequence[int]]


class SlotCache:
    """Preallocated keys and values: per layer `[slots, kv_heads, length, head_dim]`, made when a layer first writes."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of one layer; shaped after `key` and `value`, `[1, kv_heads, tokens, head_dim]`, the first time."""
        held = self._layers.get(index)
        if held is None:
            # Zeros, not garbage: masked places are multiplied by 0, and 0 * NaN is NaN.
            held = (self._zeros(key), self._zeros(value))
            self._layers[index] = held
        return held

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.slots, like.shape[1], self.length, like.shape[3])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]


class BlockSpan(NamedTuple):
    """Where a block lies in the packed row: `prompts * longest` tokens from `start`."""

    start: int
    prompts: int
    longest: int


@dataclass(slots=True)
class StepPlan:
    """One packed forward pass, made before the model runs and read by every layer's attention.

    Attributes:
        decoding: n, the number of sequences whose newest token is first in the row.
        key_length: positions that the longest of them attends to, rounded up.
        newest: [n] int64, position of each newest token; it attends to positions up to and with its own.
        source: [m] indices into the row of the tokens to be written; None when it is the whole row in order.
        slot, position: [m] where each of them is written.
    """

    cache: SlotCache
    decoding: int
    key_length: int
    newest: torch.Tensor
    spans: list[BlockSpan]
    source: torch.Tensor | None
    slot: torch.Tensor
    position: torch.Tensor
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, kv_heads: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[n * kv_heads, 1, key_length]` of the newest tokens: 0 where they attend, -inf elsewhere."""
        found = self._masks.get((kv_heads, window, dtype))
        if found is None:
            column = torch.arange(self.key_length, device=self.newest.device)
            newest = self.newest.repeat_interleave(kv_heads)[:, None, None]
            hidden = column > newest
            if window is not None and window < self.key_length:
                hidden |= column <= newest - window
            found = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[(kv_heads, window, dtype)] = found
        return found

    def write(self, storage: torch.Tensor, states: torch.Tensor) -> None:
        """Put `states` [1, kv_heads, tokens, head_dim] of the packed row into `storage` of a layer, in place."""
        heads, dim = states.shape[1], states.shape[3]
        rows = states[0].transpose(0, 1)
        if self.source is not None:
            rows = rows.index_select(0, self.source)
        storage.view(-1, dim).index_copy_(0, self._flat_index(heads), rows.reshape(-1, dim))

    def _flat_index(self, heads: int) -> torch.Tensor:
        found = self._indices.get(heads)
        if found is None:
            head = torch.arange(heads, device=self.slot.device)
            found = ((self.slot[:, None] * heads + head) * self.cache.length + self.position[:, None]).flatten()
            self._indices[heads] = found
        return found


class PackedInput(NamedTuple):
    """What the model is called with: ids and positions, `[1, tokens]`, and the plan for its attention."""

    ids: torch.Tensor
    positions: torch.Tensor
    plan: StepPlan


def pack_step(
    cache: SlotCache,
    newest_tokens: IntArray,
    newest_positions: IntArray,
    blocks: Sequence[PromptBlock],
    device: torch.device,
) -> PackedInput:
    """Lay out one forward pass: newest tokens of slots 0..n-1 (n may be 0), then the blocks of prompts."""
    count = len(newest_tokens)
    ids, positions, spans = [newest_tokens], [newest_positions], []
    source, slot, position = [np.arange(count)], [np.arange(count)], [newest_positions]
    start = count
    for block in blocks:
        prompts, longest = block.tokens.shape
        ids.append(block.tokens.ravel())
        positions.append(np.tile(np.arange(longest), prompts))
        spans.append(BlockSpan(start, prompts, longest))
        for row, (length, members) in enumerate(zip(block.lengths.tolist(), block.slots, strict=True)):
            written = np.arange(length)
            for member in members:
                source.append(start + row * longest + written)
                slot.append(np.full(length, member))
                position.append(written)
        start += prompts * longest

    def upload(parts: list[IntArray]) -> torch.Tensor:
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(device)

    longest_key = int(newest_positions.max()) + 1 if count else 0
    plan = StepPlan(
        cache=cache,
        decoding=count,
        key_length=min(cache.length, -(-longest_key // KEY_LENGTH_STEP) * KEY_LENGTH_STEP),
        newest=torch.from_numpy(newest_positions).to(device),
        spans=spans,
        source=upload(source) if blocks else None,
        slot=upload(slot),
        position=upload(position),
    )
    return PackedInput(upload(ids)[None], upload(positions)[None], plan)
