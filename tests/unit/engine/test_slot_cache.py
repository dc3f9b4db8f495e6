"""The cache grows and shrinks with the longest sequence and loses nothing on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.engine.slot_cache import PromptBlock, SlotCache, pack_step

CPU = torch.device("cpu")
SLOTS, HEADS, DIM, LIMIT = 3, 2, 4, 100


def filled(needed: int) -> tuple[SlotCache, torch.Tensor]:
    cache = SlotCache(SLOTS, LIMIT)
    cache.fit(needed, 0)
    keys, values = cache.layer(0, torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM))
    keys.copy_(torch.arange(keys.numel()).view(keys.shape))
    values.copy_(-keys)
    return cache, keys.clone()


@pytest.mark.parametrize(
    ("before", "needed", "after"),
    [(10, 16, 16), (10, 17, 32), (10, 90, 100), (90, 99, 100), (90, 50, 100), (90, 49, 64), (90, 1, 16)],
)
def test_length_follows_the_need(before: int, needed: int, after: int) -> None:
    cache, _ = filled(before)
    cache.fit(needed, SLOTS)
    assert cache.length == after


@pytest.mark.parametrize("needed", [9, 40])
def test_what_used_slots_hold_is_kept(needed: int) -> None:
    cache, before = filled(24)
    cache.fit(needed, 2)
    keys, values = cache.layer(0, before, before)
    kept = min(cache.length, before.shape[2])
    assert cache.length != before.shape[2]
    assert torch.equal(keys[:2, :, :kept], before[:2, :, :kept])
    assert torch.equal(values[:2, :, :kept], -before[:2, :, :kept])
    assert not keys[:, :, kept:].any()


def test_a_shared_prompt_is_written_to_each_of_its_slots_without_its_padding() -> None:
    cache = SlotCache(SLOTS, LIMIT)
    block = PromptBlock(np.array([[7, 8, 0], [1, 2, 3]]), np.array([2, 3]), [[0, 2], [1]])
    packed = pack_step(cache, np.array([4, 5, 6]), np.array([2, 3, 2]), [block], CPU)
    assert packed.ids.tolist() == [[4, 5, 6, 7, 8, 0, 1, 2, 3]]
    assert packed.positions.tolist() == [[2, 3, 2, 0, 1, 2, 0, 1, 2]]
    states = packed.ids.view(1, 1, -1, 1).expand(1, HEADS, -1, DIM).float()
    keys, _ = cache.layer(0, states, states)
    packed.plan.write(keys, states)
    for head in range(HEADS):
        assert keys[:, head, :4, 0].tolist() == [[7, 8, 4, 0], [1, 2, 3, 5], [7, 8, 6, 0]]


@pytest.mark.parametrize(("window", "first"), [(None, 0), (3, 3)])
def test_newest_tokens_see_up_to_themselves_and_as_far_back_as_the_window(window: int | None, first: int) -> None:
    cache = SlotCache(SLOTS, LIMIT)
    plan = pack_step(cache, np.array([4, 5]), np.array([5, 0]), (), CPU).plan
    mask = plan.mask(HEADS, window, torch.float32)
    assert mask.shape == (2 * HEADS, 1, cache.length)
    seen = [row.nonzero().flatten().tolist() for row in mask[:, 0] == 0]
    assert seen == [list(range(first, 6))] * HEADS + [[0]] * HEADS
