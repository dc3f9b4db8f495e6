"""Who gets a place, and what has to be prefilled before its next token.

Law: requests are admitted in the order in which they came, as many as there are places. Prompts that are equal, token
by token, in one pass are computed once; nothing computed under one version is reused under another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.sample import Completion, FinishReason, GenerationRequest
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.slot_cache import PromptBlock, SlotCache

PREFILL_TOKENS = 8192
_LENGTH_SLACK = 1.25


class Scheduler:
    """Waiting requests, and the table of those that hold a place."""

    def __init__(self, table: SequenceTable, cache: SlotCache, vocab_size: int) -> None:
        self._table = table
        self._cache = cache
        self._vocab_size = vocab_size
        self._max_model_len = table.tokens.shape[1]
        self._ids: set[str] = set()
        self.waiting: deque[GenerationRequest] = deque()
        self._complete: list[Completion] = []

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        return len(self._ids) - len(self.waiting)

    @property
    def request_ids(self) -> list[str]:
        """All requests that are running or waiting."""
        return sorted(self._ids)

    @property
    def unreturned(self) -> int:
        """Requests that came complete and wait for the next `take_complete`."""
        return len(self._complete)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; those that are complete already are returned by the next `take_complete`.

        Raises:
            ConfigError: a request that cannot run, by its id; none of the requests is queued then.
        """
        fresh: set[str] = set()
        for request in requests:
            if request.request_id in self._ids or request.request_id in fresh:
                raise ConfigError(f"request {request.request_id} is in the engine already")
            self._check(request)
            fresh.add(request.request_id)
        for request in requests:
            reason = _finished_before(request)
            if reason is None:
                self.waiting.append(request)
                self._ids.add(request.request_id)
            else:
                self._complete.append(carried(request, reason))

    def take_complete(self) -> list[Completion]:
        """Requests that came with all of their tokens, each once."""
        complete, self._complete = self._complete, []
        return complete

    def admit(self) -> list[int]:
        """Fill holes and free places with waiting requests, close the holes that are left; returns the new rows."""
        table = self._table
        new: list[int] = []
        holes = table.holes()
        while self.waiting and (holes or table.count < table.places):
            if holes:
                row = holes.pop(0)
            else:
                row = table.count
                table.count += 1
            table.put(row, self.waiting.popleft())
            new.append(row)
        while holes:
            table.count -= 1
            if table.count == holes[-1]:
                holes.pop()
                continue
            target = holes.pop(0)
            self._cache.move(table.count, target, int(table.lengths[table.count]))
            table.move(table.count, target)
        return new

    def remove(self, row: int, reason: FinishReason | None = None) -> Completion:
        """Take a running sequence out; its place can be given away at the next `admit`."""
        completion = self._table.remove(row, reason)
        self._ids.discard(completion.request_id)
        return completion

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Take out running and waiting requests of these ids; unknown ids are ignored."""
        wanted = self._ids.intersection(request_ids)
        taken = [self.remove(row, "abort") for row, held in self._rows() if held.request_id in wanted]
        taken += [carried(request, "abort") for request in self.waiting if request.request_id in wanted]
        self.waiting = deque(request for request in self.waiting if request.request_id not in wanted)
        self._ids -= wanted
        return taken

    def prompt_blocks(self, rows: Sequence[int]) -> list[list[PromptBlock]]:
        """What these rows need before their newest token: passes of at most `PREFILL_TOKENS` (or one prompt) each."""
        members: dict[bytes, list[int]] = {}
        for row in rows:
            if (length := int(self._table.lengths[row]) - 1) > 0:
                members.setdefault(self._table.tokens[row, :length].tobytes(), []).append(row)
        prompts = sorted(members.values(), key=lambda slots: int(self._table.lengths[slots[0]]))
        passes: list[list[PromptBlock]] = [[]]
        room = PREFILL_TOKENS
        while prompts:
            shortest = int(self._table.lengths[prompts[0][0]]) - 1
            fitting = 0
            for slots in prompts:
                length = int(self._table.lengths[slots[0]]) - 1
                if fitting and (length > shortest * _LENGTH_SLACK or (fitting + 1) * length > room):
                    break
                fitting += 1
            block = self._block(prompts[:fitting])
            if passes[-1] and block.tokens.size > room:
                passes.append([])
                room = PREFILL_TOKENS
                continue
            passes[-1].append(block)
            room -= block.tokens.size
            prompts = prompts[fitting:]
        return [blocks for blocks in passes if blocks]

    def _block(self, prompts: list[list[int]]) -> PromptBlock:
        firsts = [slots[0] for slots in prompts]
        lengths = self._table.lengths[firsts] - 1
        longest = int(lengths.max())
        tokens = np.where(np.arange(longest) < lengths[:, None], self._table.tokens[firsts, :longest], 0)
        return PromptBlock(tokens, lengths, prompts)

    def _rows(self) -> list[tuple[int, GenerationRequest]]:
        held = ((row, self._table.requests[row]) for row in range(self._table.count))
        return [(row, request) for row, request in held if request is not None]

    def _check(self, request: GenerationRequest) -> None:
        name, carried_tokens = f"request {request.request_id}", len(request.response_ids)
        prompt, budget = len(request.prompt_ids), request.params.max_tokens
        if not request.prompt_ids:
            raise ConfigError(f"{name} has an empty prompt")
        if prompt + budget > self._max_model_len:
            raise ConfigError(
                f"{name} needs {prompt} prompt tokens + max_tokens {budget} = {prompt + budget}, "
                f"but max_model_len is {self._max_model_len}"
            )
        if not carried_tokens == len(request.logprobs) == len(request.versions):
            raise ConfigError(f"{name} carries {carried_tokens} tokens but other numbers of log-probs or versions")
        if carried_tokens > budget:
            raise ConfigError(f"{name} carries {carried_tokens} tokens, more than max_tokens {budget}")
        ids = (*request.prompt_ids, *request.response_ids)
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ConfigError(f"{name} has token ids outside the vocabulary of {self._vocab_size}")


def carried(request: GenerationRequest, reason: FinishReason) -> Completion:
    """A completion of what a request brought with it."""
    return Completion(
        request.request_id, list(request.response_ids), list(request.logprobs), list(request.versions), reason
    )


def _finished_before(request: GenerationRequest) -> FinishReason | None:
    if request.response_ids and request.response_ids[-1] in request.params.stop_token_ids:
        return "stop"
    return "length" if len(request.response_ids) >= request.params.max_tokens else None
