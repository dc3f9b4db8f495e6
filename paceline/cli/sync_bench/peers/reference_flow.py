"""The flow of the reference: drain, pause, then tensor by tensor in place, then resume.

A replica generates in a thread of its own. Drained means that the step in progress is over: its sequences are cancelled
and continued later, which is the quickest drain that the reference has. Then each tensor is broadcast (gloo, as the
collective that works on a CPU) straight into the parameter, and generation goes on after the last one: so the whole
transfer is a pause.
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from paceline.cli.sync_bench.decode_engine import DecodeEngine
from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import EMBEDDING, HEAD, ModelShapes
from paceline.cli.sync_bench.peers.gloo_broadcast import join_group
from paceline.cli.sync_bench.weights import as_bytes, check_marks, make_weights, mark
from paceline.core.errors import SyncError


class ReferenceFlow:
    """Implements `peer_process.PeerSide`; rank 0 is the trainer."""

    def __init__(self, setup: SetUp, shapes: ModelShapes) -> None:
        self._name, self._rank = setup.name, setup.rank
        self._weights = make_weights(shapes, seed=setup.rank)
        self._generation: _Generation | None = None
        if setup.rank:
            engine = DecodeEngine(shapes, "mapped")
            engine.bind({**self._weights, HEAD: self._weights[EMBEDDING]}, 0)
            self._generation = _Generation(engine, setup.name)
        join_group(setup)

    def sync(self, version: int) -> float:
        """Pause, receive, resume; seconds from the last step before to the first one after."""
        if self._rank == 0:
            mark(self._weights, version)
        last_token = self._generation.pause() if self._generation else 0.0
        for tensor in self._weights.values():
            dist.broadcast(as_bytes(tensor), src=0)
        if self._generation is None:
            return 0.0
        self._generation.resume()
        return time.perf_counter() - last_token

    def check(self, version: int) -> None:
        """See `PeerSide`."""
        check_marks(self._weights, version, self._name)

    def close(self) -> None:
        """End generation and leave the group."""
        if self._generation is not None:
            self._generation.pause()
        dist.destroy_process_group()


class _Generation:
    """Decode steps in a thread, from `resume` to `pause`."""

    def __init__(self, engine: DecodeEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._asked_to_pause = threading.Event()
        self._thread: threading.Thread | None = None
        self.resume()

    def pause(self) -> float:
        """Return once no step runs; when the last one ended."""
        self._asked_to_pause.set()
        self._engine.end_rest()
        if self._thread is not None:
            self._thread.join(CALL_SECONDS)
            if self._thread.is_alive():
                raise SyncError(f"{self._name} did not end its decode step within {CALL_SECONDS:g} s")
        return time.perf_counter()

    def resume(self) -> None:
        """Generate."""
        self._asked_to_pause.clear()
        self._thread = threading.Thread(target=self._steps, name="decode", daemon=True)
        self._thread.start()

    def _steps(self) -> None:
        with torch.inference_mode():
            while not self._asked_to_pause.is_set():
                self._engine.step()


def build(setup: SetUp, shapes: ModelShapes) -> ReferenceFlow:
    """One side."""
    return ReferenceFlow(setup, shapes)
