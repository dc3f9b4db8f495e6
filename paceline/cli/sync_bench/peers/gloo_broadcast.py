"""torch gloo broadcast from the trainer to all replicas, in buckets of 64 MiB.

Two buckets take turns: while one is on its way the trainer fills the other, and a replica empties the one before into
its parameters. Tensors span buckets, so every bucket but the last is full. TCP on the loopback device.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.weights import as_bytes, check_marks, make_weights, mark

BUCKET_BYTES = 64 << 20

Piece = tuple[torch.Tensor, int]


class GlooBroadcast:
    """Implements `peer_process.PeerSide`."""

    def __init__(self, setup: SetUp, shapes: ModelShapes) -> None:
        self._name, self._rank = setup.name, setup.rank
        self._weights = make_weights(shapes, seed=setup.rank)
        self._plan = list(_buckets(self._weights))
        self._buffers = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        join_group(setup)

    def sync(self, version: int) -> float:
        """Broadcast every bucket."""
        if self._rank == 0:
            mark(self._weights, version)
        running: list[tuple[Any, int]] = []
        for index, (pieces, length) in enumerate(self._plan):
            buffer = self._buffers[index % 2][:length]
            if self._rank == 0:
                _fill(buffer, pieces)
            running.append((dist.broadcast(buffer, src=0, async_op=True), index))
            if len(running) == 2:
                self._finish(*running.pop(0))
        for work, index in running:
            self._finish(work, index)
        return 0.0

    def check(self, version: int) -> None:
        """See `PeerSide`."""
        check_marks(self._weights, version, self._name)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _finish(self, work: Any, index: int) -> None:
        work.wait()
        if self._rank:
            pieces, length = self._plan[index]
            _empty(self._buffers[index % 2][:length], pieces)


def build(setup: SetUp, shapes: ModelShapes) -> GlooBroadcast:
    """One side."""
    return GlooBroadcast(setup, shapes)


def join_group(setup: SetUp) -> None:
    """The gloo group of the trainer and all replicas, met over a file of the benchmark's directory."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(setup.directory) / 'rendezvous'}",
        rank=setup.rank,
        world_size=setup.replicas + 1,
        timeout=datetime.timedelta(seconds=CALL_SECONDS),
    )


def _buckets(weights: dict[str, torch.Tensor]) -> Iterator[tuple[list[Piece], int]]:
    """Runs of bytes that share a bucket, with their offset in it, and the bytes of the bucket."""
    pieces: list[Piece] = []
    filled = 0
    for tensor in weights.values():
        left = as_bytes(tensor)
        while left.numel():
            run = left[: BUCKET_BYTES - filled]
            pieces.append((run, filled))
            filled, left = filled + run.numel(), left[run.numel() :]
            if filled == BUCKET_BYTES:
                yield pieces, filled
                pieces, filled = [], 0
    if pieces:
        yield pieces, filled


def _fill(buffer: torch.Tensor, pieces: list[Piece]) -> None:
    for run, offset in pieces:
        buffer[offset : offset + run.numel()].copy_(run)


def _empty(buffer: torch.Tensor, pieces: list[Piece]) -> None:
    for run, offset in pieces:
        run.copy_(buffer[offset : offset + run.numel()])
