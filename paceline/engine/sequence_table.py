"""Host-side state of the sequences that hold a place: one row per place, rows 0..n-1 in use, in numpy arrays.

Law: places in use are contiguous, so a batch is a slice. A finished sequence leaves a hole that the next admission
fills, with a waiting request or, if there is none, with the last row. No Python work per sequence and step: it is
done when one comes or goes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.sample import Completion, FinishReason, GenerationRequest
from paceline.engine.slot_cache import IntArray

NO_TOKEN = -1


class SequenceTable:
    """Rows of running sequences. Arrays are `[places, ...]`; only rows below `count` mean anything.

    Attributes:
        tokens: [places, length] int64, prompt and response.
        logprobs: [places, length] float32, versions: [places, length] int64; of response tokens.
        lengths, prompt_lengths, limits: [places] int64, tokens so far, of the prompt, and at most.
        stop_ids: [places, k] int64, padded with -1.
    """

    def __init__(self, places: int, length: int) -> None:
        self.places = places
        self.count = 0
        self.tokens: IntArray = np.zeros((places, length), np.int64)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((places, length), np.float32)
        self.versions: IntArray = np.zeros((places, length), np.int64)
        self.lengths: IntArray = np.zeros(places, np.int64)
        self.prompt_lengths: IntArray = np.zeros(places, np.int64)
        self.limits: IntArray = np.zeros(places, np.int64)
        self.stop_ids: IntArray = np.full((places, 1), NO_TOKEN, np.int64)
        self.temperature: npt.NDArray[np.float32] = np.ones(places, np.float32)
        self.top_p: npt.NDArray[np.float32] = np.ones(places, np.float32)
        self.top_k: IntArray = np.full(places, -1, np.int64)
        self.requests: list[GenerationRequest | None] = [None] * places
        self._rows = np.arange(places)

    def holes(self) -> list[int]:
        """Rows below `count` whose sequence has left."""
        return [row for row in range(self.count) if self.requests[row] is None]

    def request_ids(self) -> list[str]:
        """Request of each row in use, none of which may be a hole."""
        return [request.request_id for request in self.requests[: self.count] if request is not None]

    def put(self, row: int, request: GenerationRequest) -> None:
        """Place a request, with the response tokens it carries."""
        params = request.params
        prompt, total = len(request.prompt_ids), len(request.prompt_ids) + len(request.response_ids)
        self.tokens[row, :prompt] = request.prompt_ids
        self.tokens[row, prompt:total] = request.response_ids
        self.logprobs[row, prompt:total] = request.logprobs
        self.versions[row, prompt:total] = request.versions
        self.lengths[row], self.prompt_lengths[row] = total, prompt
        self.limits[row] = prompt + params.max_tokens
        stops = len(params.stop_token_ids)
        if stops > self.stop_ids.shape[1]:
            wider = np.full((self.places, stops), NO_TOKEN, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, :stops] = params.stop_token_ids
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        self.requests[row] = request

    def move(self, source: int, target: int) -> None:
        """Take a row to another place; its old place becomes a hole."""
        for array in (self.tokens, self.logprobs, self.versions, self.lengths, self.prompt_lengths, self.limits):
            array[target] = array[source]
        for array in (self.stop_ids, self.temperature, self.top_p, self.top_k):
            array[target] = array[source]
        self.requests[target], self.requests[source] = self.requests[source], None

    def newest(self) -> tuple[IntArray, IntArray]:
        """Last token of each row in use and its position, [count] each."""
        positions = self.lengths[: self.count] - 1
        return self.tokens[self._rows[: self.count], positions], positions

    def append(self, tokens: IntArray, logprobs: npt.NDArray[np.float32], version: int) -> IntArray:
        """Add one token to each row in use; returns the rows that end with it (stop token or limit)."""
        count = self.count
        rows, ends = self._rows[:count], self.lengths[:count]
        self.tokens[rows, ends] = tokens
        self.logprobs[rows, ends] = logprobs
        self.versions[rows, ends] = version
        ends += 1
        done = (self.stop_ids[:count] == tokens[:, None]).any(axis=1) | (ends >= self.limits[:count])
        return np.flatnonzero(done)

    def remove(self, row: int, reason: FinishReason | None = None) -> Completion:
        """Take a sequence out and leave a hole. Without a reason it is "stop" or "length", as the last token says."""
        request = self.requests[row]
        if request is None:
            raise LookupError(f"row {row} holds no sequence")
        start, end = int(self.prompt_lengths[row]), int(self.lengths[row])
        if reason is None:
            reason = "stop" if (self.stop_ids[row] == self.tokens[row, end - 1]).any() else "length"
        self.requests[row] = None
        return Completion(
            request_id=request.request_id,
            token_ids=self.tokens[row, start:end].tolist(),
            logprobs=self.logprobs[row, start:end].tolist(),
            versions=self.versions[row, start:end].tolist(),
            finish_reason=reason,
        )
