"""Places and prompts: who sits where, and what has to be computed for them."""

from __future__ import annotations

import torch

from paceline.engine.scheduler import PREFILL_TOKENS, Scheduler
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.slot_cache import SlotCache
from tests.unit.engine.tiny_engines import VOCAB, request

PLACES, LENGTH = 4, 600


def made(places: int = PLACES) -> tuple[Scheduler, SequenceTable, SlotCache]:
    table, cache = SequenceTable(places, LENGTH), SlotCache(places, LENGTH)
    return Scheduler(table, cache, VOCAB), table, cache


def names(table: SequenceTable) -> list[str]:
    return [held.request_id for held in table.requests[: table.count] if held is not None]


def test_holes_are_filled_by_waiting_requests_in_their_order() -> None:
    scheduler, table, _ = made()
    scheduler.add([request(name, [3]) for name in "abcdefg"])
    assert scheduler.admit() == [0, 1, 2, 3]
    scheduler.remove(1, "abort")
    scheduler.remove(3, "abort")
    assert (scheduler.running, len(scheduler.waiting)) == (2, 3)
    assert scheduler.admit() == [1, 3]
    assert names(table) == ["a", "e", "c", "f"]
    assert (scheduler.running, len(scheduler.waiting)) == (4, 1)


def test_holes_that_nobody_fills_are_closed_with_keys_and_values() -> None:
    scheduler, table, cache = made()
    scheduler.add([request(name, [ord(name) - 90] * 3) for name in "abcd"])
    scheduler.admit()
    keys, values = cache.layer(0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    for row in range(PLACES):
        keys[row] = row + 1
        values[row] = -row - 1
    scheduler.remove(0, "abort")
    scheduler.remove(2, "abort")
    assert scheduler.admit() == []
    assert names(table) == ["d", "b"]
    assert table.count == 2
    assert table.tokens[0, :3].tolist() == [10] * 3
    assert bool((keys[0, :, :3] == 4).all() and (values[0, :, :3] == -4).all() and (keys[1] == 2).all())
    for row in range(2):
        scheduler.remove(row, "abort")
    scheduler.admit()
    assert table.count == 0


def test_aborted_requests_return_what_they_have_and_free_their_names() -> None:
    scheduler, _, _ = made(places=1)
    scheduler.add([request("a", [3]), request("b", [4])])
    scheduler.admit()
    taken = scheduler.abort(["b", "a", "unknown"])
    assert sorted((c.request_id, c.finish_reason, len(c.token_ids)) for c in taken) == [
        ("a", "abort", 0),
        ("b", "abort", 0),
    ]
    assert (scheduler.running, len(scheduler.waiting)) == (0, 0)
    scheduler.add([request("a", [3])])
    assert scheduler.admit() == [0]


def test_equal_prompts_are_one_and_lengths_are_not_mixed_far() -> None:
    scheduler, _, _ = made(places=6)
    lengths = (100, 4, 4, 5, 120, 1)
    scheduler.add([request(str(i), [3] * length) for i, length in enumerate(lengths)])
    (blocks,) = scheduler.prompt_blocks(scheduler.admit())
    # Newest tokens need no prompt pass; the two prompts of 4 are equal; a prompt of 1 needs nothing.
    assert [(block.tokens.shape, block.lengths.tolist(), list(block.slots)) for block in blocks] == [
        ((1, 3), [3], [[1, 2]]),
        ((1, 4), [4], [[3]]),
        ((2, 119), [99, 119], [[0], [4]]),
    ]
    assert blocks[2].tokens[0, 99:].tolist() == [0] * 20


def test_passes_are_bounded() -> None:
    scheduler, _, _ = made(places=40)
    scheduler.add([request(str(i), [3 + i] * 513) for i in range(40)])
    passes = scheduler.prompt_blocks(scheduler.admit())
    sizes = [sum(block.tokens.size for block in blocks) for blocks in passes]
    assert sizes == [PREFILL_TOKENS, PREFILL_TOKENS, 40 * 512 - 2 * PREFILL_TOKENS]
    assert sorted(slot for blocks in passes for block in blocks for slots in block.slots for slot in slots) == list(
        range(40)
    )
