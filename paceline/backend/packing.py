"""Lays sequences out in rows and rows in micro-batches, so that no token is computed twice and little padding is.

A *row* is a prompt followed by one or more of its responses, each response without its last token (nothing is
predicted from it). Every response sees the prompt and itself, at the positions it would have alone, so its log-probs
are those of the sequence alone; the prompt is computed once. Rows with one response each need causality only, which
right padding keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.core.sample import TrainSequence

# A row shared by more responses pays for attention over all of them: at most this many times the longest one alone.
ROW_GROWTH: Final = 4
PADDING_SHARE: Final = 0.05
PADDING_FLOOR: Final = 256
PADDING: Final = -1


@dataclass(frozen=True, slots=True)
class Row:
    """Indices of the sequences in this row (all with one prompt), the prompt's length and the row's, in tokens."""

    members: tuple[int, ...]
    prompt_length: int
    length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one pass; B rows of L tokens, N response tokens in all.

    `attention_mask` is None (causality suffices), [B, L] int64 (1 on tokens) or [B, 1, L, L] float32 (added to the
    scores). `position_ids` is None (counted from 0) or [B, L] int64. Response token i is predicted at column
    `columns[i]` of row `rows[i]` and is of the sequence `members[sequences[i]]` (an index into the batch); `targets`,
    `rollout_logprobs`, `loss_mask` (bool), `advantages`, `token_weights` and `lags` (int64, -1 where unknown) are [N].
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    rows: Tensor
    columns: Tensor
    first_column: int
    targets: Tensor
    rollout_logprobs: Tensor
    loss_mask: Tensor
    advantages: Tensor
    token_weights: Tensor
    lags: Tensor
    sequences: Tensor
    members: tuple[int, ...]


def plan_rows(sequences: Sequence[TrainSequence], chosen: Sequence[int], longest_shared_row: int) -> list[Row]:
    """Rows that hold the sequences `chosen` (indices), each once.

    A row is shared as long as it has at most `longest_shared_row` tokens and at most `ROW_GROWTH` times those of its
    longest member alone; 0 gives each sequence its own.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index in chosen:
        by_prompt.setdefault(tuple(sequences[index].prompt_ids), []).append(index)
    rows: list[Row] = []
    for prompt, indices in by_prompt.items():
        longest = len(prompt) + max(len(sequences[index].response_ids) for index in indices) - 1
        limit = min(longest_shared_row, ROW_GROWTH * longest)
        members: list[int] = []
        length = len(prompt)
        for index in indices:
            added = len(sequences[index].response_ids) - 1
            if members and length + added > limit:
                rows.append(Row(tuple(members), len(prompt), length))
                members, length = [], len(prompt)
            members.append(index)
            length += added
        rows.append(Row(tuple(members), len(prompt), length))
    return rows


def plan_micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of like length together, each micro-batch of at most `max_tokens` tokens with its padding.

    A row that is longer than that goes alone. Padding is at most `PADDING_SHARE` of a micro-batch's own tokens, or
    `PADDING_FLOOR`: below that a pass more would cost more than the padding.
    """
    batches: list[list[Row]] = []
    used = 0
    for row in sorted(rows, key=lambda row: (row.length, row.prompt_length, row.members)):
        padded = (len(batches[-1]) + 1) * row.length if batches else 0
        padding = padded - used - row.length
        if batches and padded <= max_tokens and padding <= max(PADDING_FLOOR, PADDING_SHARE * used):
            batches[-1].append(row)
            used += row.length
        else:
            batches.append([row])
            used = row.length
    return batches


def collate(rows: Sequence[Row], sequences: Sequence[TrainSequence], weights: Sequence[float]) -> MicroBatch:
    """Tensors of one micro-batch; `weights` has the loss weight of a token, per sequence of the batch."""
    width = max(row.length for row in rows)
    ids: list[list[int]] = []
    segments: list[list[int]] = []
    positions: list[list[int]] = []
    places: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        row_ids = list(sequences[row.members[0]].prompt_ids)
        row_segments = [0] * row.prompt_length
        row_positions = list(range(row.prompt_length))
        for segment, index in enumerate(row.members, start=1):
            response = sequences[index].response_ids
            start, inputs = len(row_ids), len(response) - 1
            places.append((number, row.prompt_length - 1))
            places += [(number, column) for column in range(start, start + inputs)]
            row_ids += response[:-1]
            row_segments += [segment] * inputs
            row_positions += range(row.prompt_length, row.prompt_length + inputs)
        padding = width - len(row_ids)
        ids.append(row_ids + [0] * padding)
        segments.append(row_segments + [PADDING] * padding)
        positions.append(row_positions + [0] * padding)
    shared = any(len(row.members) > 1 for row in rows)
    chosen = tuple(index for row in rows for index in row.members)
    members = [sequences[index] for index in chosen]
    lengths = torch.tensor([len(member.response_ids) for member in members])
    place = torch.tensor(places)
    loss_mask = torch.tensor([kept for member in members for kept in member.loss_mask]).bool()
    token_weights = torch.tensor([weights[index] for index in chosen]).repeat_interleave(lengths)
    return MicroBatch(
        input_ids=torch.tensor(ids),
        attention_mask=(_tree_mask if shared else _padding_mask)(torch.tensor(segments)),
        position_ids=torch.tensor(positions) if shared else None,
        rows=place[:, 0],
        columns=place[:, 1],
        first_column=min(row.prompt_length for row in rows) - 1,
        targets=torch.tensor([token for member in members for token in member.response_ids]),
        rollout_logprobs=torch.tensor([logprob for member in members for logprob in member.rollout_logprobs]),
        loss_mask=loss_mask,
        advantages=torch.tensor([member.advantage for member in members]).repeat_interleave(lengths),
        token_weights=torch.where(loss_mask, token_weights, 0.0),
        lags=torch.tensor([lag for member in members for lag in member.lags or [-1] * len(member.response_ids)]).long(),
        sequences=torch.arange(len(members)).repeat_interleave(lengths),
        members=chosen,
    )


def _padding_mask(segments: Tensor) -> Tensor | None:
    mask = segments != PADDING
    return None if bool(mask.all()) else mask.long()


def _tree_mask(segments: Tensor) -> Tensor:
    """[B, 1, L, L] float32: 0 where a column is seen (prompt, own response up to here), else the lowest float."""
    width = segments.shape[1]
    queries, keys = segments[:, :, None], segments[:, None, :]
    seen = ((keys == 0) | (keys == queries)) & torch.ones(width, width).tril().bool()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
