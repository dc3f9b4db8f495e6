"""The marker model: a fake whose every token tells which weights made it, whatever the labels say.

The trainer holds an int64 tensor `marker` equal to the number of updates made, beside a few ordinary tensors. Under
marker v the token at response position p is `1000 * v + p` and its log-prob is `-(v + p / 1000)`; v is read from the
tensor that the engine really holds at that step. The prefix cache remembers, per block of 4 prompt tokens, the marker
in force when the block was filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import CoverageError
from paceline.core.sample import Completion, GenerationRequest, StepTokens, TrainBatch
from paceline.testing.weight_memory import PointedWeights, WeightMemory

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

    def save_state(self, directory: str) -> bool:
        """`trainer.safetensors` with the two tensors."""
        save_file({"marker": self._marker, "weight": self._weight}, Path(directory) / "trainer.safetensors")
        return bool(torch.isfinite(self._weight).all())

    def load_state(self, directory: str) -> None:
        """Read them again."""
        state = load_file(Path(directory) / "trainer.safetensors")
        self._marker.copy_(state["marker"])
        self._weight.copy_(state["weight"])


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    prefill_markers: set[int]


class MarkerEngine:
    """An inference engine of the marker model. A response ends at `max_tokens` ("length"); `places` run at a time.

    `memory` decides how it applies weights (`weight_memory`); without it, it points at what it is given.
    """

    def __init__(self, *, width: int = 8, places: int = 64, memory: WeightMemory | None = None) -> None:
        self._expected = {
            "marker": ("int64", (1,)),
            "weight": ("float32", (width,)),
            "head": ("float32", (width,)),
        }
        self._places = places
        self._memory: WeightMemory = PointedWeights() if memory is None else memory
        self._version: int | None = None
        self._queue: list[GenerationRequest] = []
        self._active: list[_Sequence] = []
        self._prefix_cache: dict[tuple[int, ...], int] = {}
        self._tokens_generated = 0
        self._last_step: StepTokens | None = None
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
        return int(self._memory.tensors["marker"][0])

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """That of the memory."""
        return self._memory.apply

    def expected_ties(self) -> Sequence[tuple[str, str]]:
        """None: `head` may be tied to `weight` or not."""
        return ()

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """`marker`, `weight`, `head`."""
        return self._expected

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Hold these tensors; the prefix cache of the old ones is cleared with them."""
        offered = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        if offered != self._expected:
            raise CoverageError(f"marker engine expects {self._expected}, was offered {offered}")
        self._memory.put(tensors)
        self._version = version
        self._prefix_cache.clear()

    def patched(self, version: int) -> None:
        """The memory was changed in place."""
        self._version = version
        self._prefix_cache.clear()

    def unbind(self) -> None:
        """Hold nothing; forget all requests."""
        self._memory.clear()
        self._version = None
        self._queue = []
        self._active = []

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is held now."""
        return self._memory.tensors

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
        before = self._tokens_generated
        for sequence in self._active:
            self._decode(sequence)
        self._last_step = self._newest() if self._tokens_generated > before else None
        finished = [s for s in self._active if len(s.tokens) >= s.request.params.max_tokens]
        self._active = [s for s in self._active if len(s.tokens) < s.request.params.max_tokens]
        return [Completion(s.request.request_id, s.tokens, s.logprobs, s.versions, "length") for s in finished]

    @property
    def last_step(self) -> StepTokens | None:
        """What the last step made."""
        return self._last_step

    def _newest(self) -> StepTokens:
        grown = [s for s in self._active if len(s.tokens) > len(s.request.response_ids)]
        return StepTokens(
            [s.request.request_id for s in grown],
            [s.tokens[-1] for s in grown],
            [s.logprobs[-1] for s in grown],
            self._version if self._version is not None else 0,
        )

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
