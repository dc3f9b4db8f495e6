"""From two versions of a run of elements to planes: what the entropy coder gets, class after class.

`torch_planes` makes the same planes from torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.weights.delta import classes, scan
from paceline.weights.delta.number_line import NumberLine

Level = Literal["fast", "small"]


@dataclass(frozen=True)
class Planes:
    """Changes of one run of elements, sorted by class, then by position.

    `edges` are the exponents at which classes 1, 2, ... begin; `totals` is how many elements each class has, `counts`
    how many of them changed. `gaps` (uint32) are unchanged elements of the same class since its last change;
    `distances` are zigzag distances on the number line, never 0, unsigned of the element's width.

    Example: base 5 6 7 8 -> 5 7 7 6 as int8 is one class, totals [4], counts [2], gaps [1, 1], distances [2, 3].
    """

    edges: tuple[int, ...]
    totals: NDArray[np.int64]
    counts: NDArray[np.int64]
    gaps: NDArray[np.uint32]
    distances: NDArray[Any]

    @property
    def changed(self) -> int:
        """How many elements changed."""
        return len(self.gaps)


def planes_of(base: NDArray[Any], target: NDArray[Any], line: NumberLine, level: Level) -> Planes:
    """Compare `base` and `target` (1-D, the line's unsigned type, fewer than 2^32 elements)."""
    positions = np.empty(len(base), np.uint32)
    distances = np.empty(len(base), line.unsigned)
    changed = scan.find_changes(base, target, line.arithmetic, positions, distances)
    positions, distances = positions[:changed], distances[:changed]
    edges = _edges(base, positions, distances, line) if level == "small" and changed else ()
    gaps = np.empty(changed, np.uint32)
    if not edges:
        scan.gaps_between(positions, gaps)
        return Planes((), np.array([len(base)]), np.array([changed]), gaps, distances.copy())
    count = len(edges) + 1
    totals, counts = np.zeros(count, np.int64), np.zeros(count, np.int64)
    owners, ranks, split = np.empty(changed, np.uint8), np.empty(changed, np.uint32), np.empty(changed, line.unsigned)
    bounds = classes.bounds_of(edges, line)
    magnitude, mantissa = classes.magnitude_bits(line), np.uint64(line.mantissa or 0)
    scan.rank_changes(base, bounds, magnitude, mantissa, positions, owners, ranks, totals)
    scan.split_classes(owners, ranks, distances, counts, gaps, split)
    return Planes(edges, totals, counts, gaps, split)


def _edges(
    base: NDArray[Any], positions: NDArray[np.uint32], distances: NDArray[Any], line: NumberLine
) -> tuple[int, ...]:
    if line.mantissa is None:
        return ()
    counts = np.zeros((3, classes.EXPONENTS), np.int64)
    magnitude, mantissa, step = classes.magnitude_bits(line), np.uint64(line.mantissa), classes.SAMPLE_STEP
    classes.count_exponents(base, positions, distances, magnitude, mantissa, step, counts)
    found = classes.merge_exponents(counts, step, classes.MAX_CLASSES)
    return tuple(int(edge) for edge in found)
