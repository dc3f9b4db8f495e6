"""Memory of one process for whole versions: aligned like an arena, checked before it is taken, used again."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.store.capacity import check_memory
from paceline.weights.layout import ALIGNMENT


class Buffers:
    """What no tensor refers to any more is handed out again: touching a fresh page costs several times as much as
    filling a warm one. At most one buffer waits for its next use.
    """

    def __init__(self) -> None:
        self._spare: list[NDArray[np.uint8]] = []
        self._closed = False

    def take(self, nbytes: int, what: str) -> torch.Tensor:
        """Uninitialised bytes (uint8) whose start is aligned like an arena.

        Raises:
            CapacityError: there is no memory for `what`.
        """
        size = nbytes + ALIGNMENT
        raw = self._spare.pop() if self._spare else None
        if raw is None or len(raw) != size:
            del raw  # before the memory is counted
            check_memory(nbytes, what)
            raw = np.empty(size, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        lent = raw[start : start + nbytes]
        # Tensors refer to `lent`, and it alone goes when the last of them goes.
        weakref.finalize(lent, self._take_back, raw)
        return torch.from_numpy(lent)

    def close(self) -> None:
        """Keep nothing any more."""
        self._closed = True
        self._spare.clear()

    def _take_back(self, raw: NDArray[np.uint8]) -> None:
        if not self._closed and not self._spare:
            self._spare.append(raw)
