"""An inference engine whose decode step really reads weights, and that notes what keeps its sequence from a token.

A step multiplies a vector with the attention matrices of one layer, the layers in turn. The rest of its pace is rest,
so that a small machine has room for several replicas; a command ends it early (`end_rest`), and waits only for a step
at work. One sequence that never ends is what a swap holds up.

States: unbound -> bound(version) -> stepping; a bind between two steps opens a pause, which the next step closes.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from paceline.cli.sync_bench.messages import Apply, PauseRecord
from paceline.cli.sync_bench.model_shapes import EMBEDDING, HEAD, HIDDEN, ModelShapes
from paceline.core.errors import CoverageError
from paceline.core.sample import Completion, GenerationRequest, StepTokens

PACE_SECONDS = 0.02
_KEPT = 64
_READ = ("q_proj", "k_proj", "v_proj")


class DecodeEngine:
    """Implements `core.ports.InferenceEngine` for one sequence; `apply` says what `bind` does."""

    def __init__(self, shapes: ModelShapes, apply: Apply) -> None:
        self._shapes = shapes
        self._apply: Apply = apply
        self._expected = {name: ("bfloat16", shape) for name, shape in (*shapes.stored.items(), (HEAD, self._head()))}
        self._tensors: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self._request: GenerationRequest | None = None
        self._steps = 0
        self._vector = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
        self._ended: float | None = None
        self._swapped = False
        self._command = threading.Event()
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._durations: deque[float] = deque(maxlen=_KEPT)
        self.last_pause: PauseRecord | None = None

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """Mapped points at the tensors; copied fills memory of its own."""
        return self._apply

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The model's tensors and the tied head."""
        return self._expected

    def expected_ties(self) -> Sequence[tuple[str, str]]:
        """The embedding and the head."""
        return [(EMBEDDING, HEAD)]

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """See `InferenceEngine.bind`."""
        fits = len(tensors) == len(self._expected) and all(
            (tensor := tensors.get(name)) is not None and tensor.dtype is torch.bfloat16 and tensor.shape == shape
            for name, (_, shape) in self._expected.items()
        )
        if not fits:
            raise CoverageError("the offered tensors are not those of the model")
        self._tensors = dict(tensors) if self._apply == "mapped" else self._filled(tensors)
        self._version = version
        self._swapped = True
        self.last_pause = None

    def patched(self, version: int) -> None:
        """See `PatchableEngine.patched`."""
        self._version = version
        self._swapped = True
        self.last_pause = None

    def filled(self, version: int) -> None:
        """See `FillableEngine.filled`."""
        self.patched(version)

    def unbind(self) -> None:
        """See `InferenceEngine.unbind`."""
        self._tensors = {}
        self._version = None
        self._request = None

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """What the next step reads."""
        return self._tensors

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the last of them."""
        self._request = requests[-1]

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Give the sequence back without its tokens, which nobody wants."""
        if self._request is None or self._request.request_id not in request_ids:
            return []
        done = Completion(self._request.request_id, [], [], [], "abort")
        self._request = None
        return [done]

    def step(self) -> list[Completion]:
        """One token; the sequence never ends."""
        faults = _page_faults()
        began = time.perf_counter()
        layer = self._steps % self._shapes.layers
        for part in _READ:
            matrix = self._tensors[f"model.layers.{layer}.self_attn.{part}.weight"]
            torch.nn.functional.linear(self._vector, matrix)
        duration = time.perf_counter() - began
        self._steps += 1
        self._note(began, duration, _page_faults() - faults)
        if self._command.wait(max(0.0, PACE_SECONDS - duration)):
            self._command.clear()
        self._ended = time.perf_counter()
        return []

    @property
    def last_step(self) -> StepTokens | None:
        """None: nobody wants the tokens."""
        return None

    @property
    def version(self) -> int | None:
        """Packed version of the bound weights."""
        return self._version

    @property
    def running(self) -> int:
        """One, once a request has come."""
        return 0 if self._request is None else 1

    @property
    def waiting(self) -> int:
        """Nobody waits."""
        return 0

    @property
    def tokens_generated(self) -> int:
        """Steps made."""
        return self._steps

    def end_rest(self) -> None:
        """A command has come: the rest after this step, or the next one, ends now. From any thread."""
        self._command.set()

    def forget_gap(self) -> None:
        """The replica was paused from outside: the time since the last step is no gap between two steps."""
        self._ended = None

    def _note(self, began: float, duration: float, faults: int) -> None:
        gap = None if self._ended is None else began - self._ended
        if self._swapped and gap is not None and self._gaps and self._durations:
            self.last_pause = PauseRecord(
                gap=gap,
                plain_gap=statistics.median(self._gaps),
                first_step=duration,
                plain_step=statistics.median(self._durations),
                first_step_faults=faults,
            )
        elif gap is not None:
            self._gaps.append(gap)
        self._durations.append(duration)
        self._swapped = False

    def _filled(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The engine's own memory with these values in it; allocated at the first time and kept."""
        for name in self._shapes.stored:
            if name not in self._own:
                self._own[name] = torch.empty_like(tensors[name])
            self._own[name].copy_(tensors[name])
        return {**self._own, HEAD: self._own[EMBEDDING]}

    def _head(self) -> tuple[int, ...]:
        return self._shapes.stored[EMBEDDING]


def _page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_minflt + usage.ru_majflt
