"""The marker model: a fake whose every token tells which weights made it, whatever the labels say.

The trainer holds an int64 tensor `marker` equal to the number of updates made, beside a few ordinary tensors. Under
marker v the token at response position p is `1000 * v + p` and its log-prob is `-(v + p / 1000)`; v is read from the
tensor that the engine really holds at that step. The prefix cache remembers, per block of 4 prompt tokens, the marker
in force when the block was filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import CoverageError
from paceline.core.sample import Completion, GenerationRequest, TrainBatch

PREFIX_BLOCK = 4


def marker_token(marker: int, position: int) -> int:
    """The token that marker v makes at a response position."""
    return 1000 * marker + position


def marker_logprob(marker: int, position: int) -> float:
    """Its log-prob."""
    return -(marker + position / 1000)


def marker_of(token: int) -> int:
    """Which marker made this token."""
    return token // 1000


class MarkerBackend:
    """A train backend whose update raises the marker by one."""

    def __init__(self, width: int = 8) -> None:
        self._marker = torch.zeros(1, dtype=torch.int64)
        self._weight = torch.zeros(width, dtype=torch.float32)
        self.batches: list[TrainBatch] = []

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Keep the batch; raise marker and weight by one."""
        self.batches.append(batch)
        self._marker += 1
        self._weight += 1.0
        return {"actor/pg_loss": 0.0}

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """`marker`, `weight`, and `head`, which is tied to `weight`."""
        return [("marker", self._marker), ("weight", self._weight), ("head", self._weight)]

    def save_pretrained(self, directory: str) -> None:
        """There is nothing worth saving."""


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    prefill_markers: set[int]


class MarkerEngine:
    """An inference engine of the marker model. A response ends at `max_tokens` ("length"); `places` run at a time."""

    def __init__(self, *, width: int = 8, places: int = 64) -> None:
        self._expected = {
            "marker": ("int64", (1,)),
            "weight": ("float32", (width,)),
            "head": ("float32", (width,)),
        }
        self._places = places
        self._tensors: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self._queue: list[GenerationRequest] = []
        self._active: list[_Sequence] = []
        self._prefix_cache: dict[tuple[int, ...], int] = {}
        self._tokens_generated = 0
        self.prefill_markers: dict[str, set[int]] = {}

    @property
    def version(self) -> int | None:
        """Packed version of the bound weights."""
        return self._version

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._queue)

    @property
    def tokens_generated(self) -> int:
        """Response tokens made so far."""
        return self._tokens_generated

    @property
    def marker(self) -> int:
        """The marker of the tensor held now."""
        return int(self._tensors["marker"][0])

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """`marker`, `weight`, `head`."""
        return self._expected

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Hold these tensors; the prefix cache of the old ones is cleared with them."""
        offered = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        if offered != self._expected:
            raise CoverageError(f"marker engine expects {self._expected}, was offered {offered}")
        self._tensors = dict(tensors)
        self._version = version
        self._prefix_cache.clear()

    def unbind(self) -> None:
        """Hold nothing; forget all requests."""
        self._tensors = {}
        self._version = None
        self._queue = []
        self._active = []

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is held now."""
        return self._tensors

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._queue.extend(requests)

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Take requests out with what they have."""
        wanted = set(request_ids)
        gone = [s for s in self._active if s.request.request_id in wanted]
        gone += [self._begin(r) for r in self._queue if r.request_id in wanted]
        self._active = [s for s in self._active if s.request.request_id not in wanted]
        self._queue = [r for r in self._queue if r.request_id not in wanted]
        return [Completion(s.request.request_id, s.tokens, s.logprobs, s.versions, "abort") for s in gone]

    def step(self) -> list[Completion]:
        """One token for every sequence that has a place."""
        while self._queue and len(self._active) < self._places:
            sequence = self._begin(self._queue.pop(0))
            self._prefill(sequence)
            self._active.append(sequence)
        for sequence in self._active:
            self._decode(sequence)
        finished = [s for s in self._active if len(s.tokens) >= s.request.params.max_tokens]
        self._active = [s for s in self._active if len(s.tokens) < s.request.params.max_tokens]
        return [Completion(s.request.request_id, s.tokens, s.logprobs, s.versions, "length") for s in finished]

    def _begin(self, request: GenerationRequest) -> _Sequence:
        return _Sequence(request, [*request.response_ids], [*request.logprobs], [*request.versions], set())

    def _prefill(self, sequence: _Sequence) -> None:
        prompt = sequence.request.prompt_ids
        for end in range(PREFIX_BLOCK, len(prompt) + 1, PREFIX_BLOCK):
            block = tuple(prompt[:end])
            sequence.prefill_markers.add(self._prefix_cache.setdefault(block, self.marker))
        self.prefill_markers[sequence.request.request_id] = sequence.prefill_markers

    def _decode(self, sequence: _Sequence) -> None:
        if len(sequence.tokens) >= sequence.request.params.max_tokens:
            return
        position = len(sequence.tokens)
        marker = self.marker
        sequence.tokens.append(marker_token(marker, position))
        sequence.logprobs.append(marker_logprob(marker, position))
        sequence.versions.append(self._version if self._version is not None else 0)
        self._tokens_generated += 1
