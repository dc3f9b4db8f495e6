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

LENGTH_STEP = 16
_SEEN, _HIDDEN = np.float32(0), np.float32(-np.inf)

IntArray = npt.NDArray[np.int64]


class PromptBlock(NamedTuple):
    """Prompts of about one length: `tokens` [prompts, longest], `lengths` [prompts], and the slots that share each."""

    tokens: IntArray
    lengths: IntArray
    slots: Sequence[Sequence[int]]


class SlotCache:
    """Keys and values per layer, `[slots, kv_heads, length, head_dim]`, made when a layer first writes.

    `length` follows the longest sequence in steps of at least an eighth, so that what a decode step reads is one dense
    stretch of memory: reading past gaps took half as long again, copying at a step is a fraction of that.
    """

    def __init__(self, slots: int, limit: int) -> None:
        self.slots = slots
        self.limit = limit
        self.length = min(limit, LENGTH_STEP)
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

    def fit(self, needed: int, used_slots: int) -> None:
        """Make room for `needed` positions; give room back when less than half is needed. Keeps the first slots."""
        if self.length // 2 <= needed <= self.length:
            return
        roomy = needed + needed // 8
        wanted = min(self.limit, -(-roomy // LENGTH_STEP) * LENGTH_STEP)
        if wanted == self.length:
            return
        kept = min(wanted, self.length)
        self.length = wanted
        for index, states in self._layers.items():
            fresh = tuple(self._zeros(state) for state in states)
            for new, old in zip(fresh, states, strict=True):
                new[:used_slots, :, :kept] = old[:used_slots, :, :kept]
            self._layers[index] = (fresh[0], fresh[1])

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

    Small index arithmetic is done in numpy, where an operation costs a fraction of what it does in torch.

    Attributes:
        decoding: n, the number of sequences whose newest token is first in the row.
        newest: [n] position of each newest token; it attends to positions up to and with its own.
        source: [m] indices into the row of the tokens to be written; None when it is the whole row in order.
        slot, position: [m] where each of them is written.
    """

    cache: SlotCache
    device: torch.device
    decoding: int
    newest: IntArray
    spans: list[BlockSpan]
    source: torch.Tensor | None
    slot: IntArray
    position: IntArray
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, kv_heads: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[n * kv_heads, 1, length]` of the newest tokens: 0 where they attend, -inf elsewhere."""
        found = self._masks.get((kv_heads, window, dtype))
        if found is None:
            column = np.arange(self.cache.length)
            newest = np.repeat(self.newest, kv_heads)[:, None, None]
            hidden = column > newest
            if window is not None and window < self.cache.length:
                hidden |= column <= newest - window
            found = torch.from_numpy(np.where(hidden, _HIDDEN, _SEEN)).to(self.device, dtype)
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
            row = (self.slot * heads)[:, None] + np.arange(heads)
            found = torch.from_numpy((row * self.cache.length + self.position[:, None]).ravel()).to(self.device)
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
    """Lay out one forward pass: newest tokens of slots 0..n-1 (n may be 0), then the blocks of prompts.

    All positions lie below `cache.length`.
    """
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

    def join(parts: list[IntArray]) -> IntArray:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    plan = StepPlan(
        cache=cache,
        device=device,
        decoding=count,
        newest=newest_positions,
        spans=spans,
        source=torch.from_numpy(join(source)).to(device) if blocks else None,
        slot=join(slot),
        position=join(position),
    )
    packed_ids, packed_positions = (torch.from_numpy(join(part)).to(device)[None] for part in (ids, positions))
    return PackedInput(packed_ids, packed_positions, plan)
