"""Attention over a `SlotCache`, in the form in which transformers calls registered attention implementations.

The plan of the pass reaches it as the keyword `slot_step` of the model's forward, which models with an attention
backend hand down unchanged. Grouped-query heads are never repeated: the query heads of a group are the rows of one
small matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from paceline.core.errors import ConfigError
from paceline.engine.slot_cache import BlockSpan, StepPlan

IMPLEMENTATION = "paceline_slots"
_UNSUPPORTED = ("s_aux", "position_bias")


def register_slot_attention() -> None:
    """Make the implementation known to transformers under `IMPLEMENTATION`; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, slot_attention)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values of a packed row to their slots and attend.

    Args:
        module: the attention module; its `layer_idx` names the cache layer.
        query: [1, heads, tokens, head_dim]; `key`, `value`: [1, kv_heads, tokens, head_dim].
        attention_mask: not used, the plan knows who attends to what.
        options: `slot_step` (the `StepPlan`), `sliding_window`, `softcap` (score bound of Gemma 2).

    Returns:
        [1, tokens, heads, head_dim], and None for the weights.
    """
    if any(options.get(name) is not None for name in _UNSUPPORTED):
        raise ConfigError(f"the embedded engine cannot run {type(module).__name__}: it uses one of {_UNSUPPORTED}")
    plan: StepPlan | None = options.get("slot_step")
    if plan is None:
        raise ConfigError(f"the embedded engine cannot run {type(module).__name__}: keywords do not reach it")
    window: int | None = options.get("sliding_window")
    softcap: float | None = options.get("softcap")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = plan.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    plan.write(keys, key)
    plan.write(values, value)
    parts = []
    if plan.decoding:
        parts.append(_attend_newest(query[0, :, : plan.decoding], keys, values, plan, (scale, window, softcap)))
    parts += [_attend_block(span, (query, key, value), scale, window, softcap) for span in plan.spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _attend_newest(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: StepPlan,
    how: tuple[float, int | None, float | None],
) -> torch.Tensor:
    """Newest tokens `query` [heads, n, head_dim] against slots 0..n-1; returns [n, heads, head_dim]."""
    scale, window, softcap = how
    heads, count, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.transpose(0, 1).reshape(count * kv_heads, heads // kv_heads, dim)
    seen_keys = keys[:count].flatten(0, 1)
    seen_values = values[:count].flatten(0, 1)
    mask = plan.mask(kv_heads, window, query.dtype)
    if softcap is None:
        scores = torch.baddbmm(mask, grouped, seen_keys.transpose(1, 2), alpha=scale)
    else:
        scores = torch.tanh(torch.bmm(grouped, seen_keys.transpose(1, 2)) * (scale / softcap)) * softcap + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, seen_values).view(count, heads, values.shape[-1])


def _attend_block(
    span: BlockSpan,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of a block of prompts among themselves; returns [prompts * longest, heads, head_dim]."""
    _, prompts, longest = span
    query, key, value = (_unpack(part, span) for part in states)
    grouped = query.shape[1] != key.shape[1]
    if softcap is None and (window is None or window >= longest):
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = torch.matmul(query, key.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(longest, device=query.device)[:, None] - torch.arange(longest, device=query.device)
        hidden = (distance < 0) | (distance >= (longest if window is None else window))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        attended = torch.matmul(weights, value)
    return attended.transpose(1, 2).reshape(prompts * longest, query.shape[1], value.shape[-1])


def _unpack(states: torch.Tensor, span: BlockSpan) -> torch.Tensor:
    start, prompts, longest = span
    heads, dim = states.shape[1], states.shape[3]
    part = states[0, :, start : start + prompts * longest].reshape(heads, prompts, longest, dim)
    return part.transpose(0, 1)
