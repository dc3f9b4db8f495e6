"""What the machine can do: plain copies from warm to warm memory, and the parts of a capture one by one.

Warm means that every page of both buffers is present; the buffers are larger than the caches. Rates are bytes that were
copied per second, not bytes that crossed the bus.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from paceline.cli.sync_bench.messages import CaptureParts, CopyRate
from paceline.cli.sync_bench.model_shapes import PROBE_BYTES
from paceline.cli.sync_bench.stream_copy import stream_copy
from paceline.cli.sync_bench.weights import as_bytes
from paceline.weights.digesting_copy import CopyJob, copy_and_digest
from paceline.weights.work_sharing import share_out

_COPIES = 3
_SPLITS = 5
_RUN_SECONDS = 60.0
_RUN_BYTES = 4 << 20


class CopyProbe:
    """Two buffers of at most `PROBE_BYTES` and the rate between them, measured anew each time."""

    def __init__(self, model_bytes: int) -> None:
        size = min(PROBE_BYTES, model_bytes)
        self._source = np.ones(size, dtype=np.uint8)
        self._target = np.zeros(size, dtype=np.uint8)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="memcpy")

    def measure(self) -> CopyRate:
        """The median of a few copies, with one thread and with two that have a half each."""
        return CopyRate(one_thread=self._rate(self._copy_whole), two_threads=self._rate(self._copy_halves))

    def _rate(self, copy: Callable[[], None]) -> float:
        return self._source.nbytes / statistics.median(_timed(copy) for _ in range(_COPIES))

    def _copy_whole(self) -> None:
        np.copyto(self._target, self._source)

    def _copy_halves(self) -> None:
        half = self._source.nbytes // 2
        parts = (slice(0, half), slice(half, None))
        wait([self._pool.submit(np.copyto, self._target[part], self._source[part]) for part in parts], _RUN_SECONDS)


def split_capture(weights: Mapping[str, torch.Tensor], threads: int) -> CaptureParts:
    """Seconds that the digest and the guard add to a capture of `weights`, measured on a part and scaled to the whole.

    Three ways take turns: the copy alone, the copy with the digest, the copy with digest and guard.
    """
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if sum(t.nbytes for t in part.values()) < PROBE_BYTES:
            part[name] = tensor
    jobs = [CopyJob(name, tensor, torch.zeros_like(tensor)) for name, tensor in part.items()]
    rounds: list[tuple[float, float, float]] = []
    for _ in range(_SPLITS):
        copied = _timed(lambda: _copy(jobs, threads))
        hashed = _timed(lambda: copy_and_digest(jobs, "off", threads))
        guarded = _timed(lambda: copy_and_digest(jobs, "error", threads))
        rounds.append((copied, hashed, guarded))
    scale = sum(t.nbytes for t in weights.values()) / sum(t.nbytes for t in part.values())
    return CaptureParts(
        copy_seconds=scale * statistics.median(copied for copied, _, _ in rounds),
        digest_seconds=scale * max(0.0, statistics.median(hashed - copied for copied, hashed, _ in rounds)),
        guard_seconds=scale * max(0.0, statistics.median(guarded - hashed for _, hashed, guarded in rounds)),
    )


def _copy(jobs: list[CopyJob], threads: int) -> None:
    """The same copy without digest and guard."""

    runs = [
        (target[start : start + _RUN_BYTES], source[start : start + _RUN_BYTES])
        for target, source in ((as_bytes(job.target).numpy(), as_bytes(job.source).numpy()) for job in jobs)
        for start in range(0, len(source), _RUN_BYTES)
    ]
    share_out(threads, lambda run: stream_copy(*run), runs)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
