"""Rows, micro-batches and their tensors, by hand."""

from __future__ import annotations

import torch

from paceline.backend.packing import Row, collate, plan_micro_batches, plan_rows
from tests.unit.backend.tiny_models import ragged_sequences, sequence

PROMPT = (3, 4)


def test_each_sequence_has_its_own_row_when_nothing_may_be_shared() -> None:
    sequences = ragged_sequences()
    rows = plan_rows(sequences, range(len(sequences)), 0)
    assert [row.members for row in rows] == [(index,) for index in range(len(sequences))]
    assert rows[3] == Row((3,), 4, 8)


def test_responses_to_one_prompt_share_a_row() -> None:
    sequences = ragged_sequences()
    rows = plan_rows(sequences, range(len(sequences)), 64)
    # The last token of a response is no input: 4 + 2 + 1 + 0 + 4.
    assert rows == [Row((0, 1, 2, 3), 4, 11), Row((4, 5), 2, 6), Row((6,), 6, 9)]


def test_only_chosen_sequences_are_laid_out() -> None:
    assert [row.members for row in plan_rows(ragged_sequences(), (1, 3, 5), 64)] == [(1, 3), (5,)]


def test_a_row_ends_at_its_limit() -> None:
    sequences = [sequence(PROMPT, [5, 6, 7], 1.0) for _ in range(5)]
    assert [row.members for row in plan_rows(sequences, range(5), 7)] == [(0, 1), (2, 3), (4,)]
    # Four times the longest alone is 16: two for the prompt, seven times two.
    many = [sequence(PROMPT, [5, 6, 7], 1.0) for _ in range(9)]
    assert [len(row.members) for row in plan_rows(many, range(9), 1000)] == [7, 2]


def test_micro_batches_hold_rows_of_like_length_and_keep_to_the_bound() -> None:
    rows = [Row((index,), 1, length) for index, length in enumerate([9, 2, 8, 2, 30])]
    batches = plan_micro_batches(rows, 18)
    assert [[row.length for row in batch] for batch in batches] == [[2, 2], [8, 9], [30]]


def test_a_shared_row_by_hand() -> None:
    sequences = [sequence(PROMPT, [5, 6, 7], 1.0, mask=[1, 0, 1]), sequence(PROMPT, [8, 9], -2.0)]
    batch = collate([Row((0, 1), 2, 5)], sequences, (0.5, 0.25))
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 8]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.attention_mask is not None
    assert (batch.attention_mask == 0).long().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]]
    ]
    assert batch.columns.tolist() == [1, 2, 3, 1, 4]
    assert batch.rows.tolist() == [0] * 5
    assert batch.first_column == 1
    assert batch.targets.tolist() == [5, 6, 7, 8, 9]
    assert batch.loss_mask.tolist() == [True, False, True, True, True]
    assert batch.advantages.tolist() == [1.0, 1.0, 1.0, -2.0, -2.0]
    assert batch.token_weights.tolist() == [0.5, 0.0, 0.5, 0.25, 0.25]


def test_rows_of_their_own_are_padded_on_the_right() -> None:
    sequences = [sequence(PROMPT, [5, 6, 7], 1.0), sequence((9,), [8, 9], 1.0)]
    batch = collate([Row((1,), 1, 2), Row((0,), 2, 4)], sequences, (1.0, 1.0))
    assert batch.input_ids.tolist() == [[9, 8, 0, 0], [3, 4, 5, 6]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.position_ids is None
    assert (batch.rows.tolist(), batch.columns.tolist()) == ([0, 0, 1, 1, 1], [0, 1, 1, 2, 3])
    assert batch.first_column == 0


def test_rows_without_padding_need_no_mask() -> None:
    sequences = [sequence(PROMPT, [5, 6], 1.0), sequence((9, 8), [8, 9], 1.0)]
    batch = collate(plan_rows(sequences, (0, 1), 64), sequences, (1.0, 1.0))
    assert batch.attention_mask is None
    assert torch.equal(batch.loss_mask, torch.ones(4).bool())
