"""Which ranges of magnitude of the base make a class: exponents whose elements change alike are put together.

A step of Adam is about as long everywhere, so how often a bf16 value moves, and by how many units, depends on how large
it is. Each class costs some bytes in the header, so neighbours are merged as long as that makes the whole shorter. The
choice is the sender's alone and travels as a list of exponents; both sides then count elements in the same way.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.weights.delta.compiled import kernel
from paceline.weights.delta.number_line import NumberLine
from paceline.weights.delta.scan import MAX_EDGES

MAX_CLASSES = MAX_EDGES + 1
SAMPLE_STEP = 61  # one of so many elements of the base is looked at; odd, so that no column of a matrix is favoured
EXPONENTS = 2048  # float64 has the most
CLASS_BITS = 40.0  # what a class costs: its edge, its count and its two tables


def magnitude_bits(line: NumberLine) -> np.uint64:
    """Mask of everything but the sign."""
    return np.uint64((1 << (8 * line.width - 1)) - 1)


def bounds_of(edges: tuple[int, ...], line: NumberLine) -> NDArray[np.uint64]:
    """Lowest magnitude of each class but the first, from the exponents at which classes begin."""
    return np.array([edge << (line.mantissa or 0) for edge in edges], dtype=np.uint64)


@kernel
def count_exponents(
    base: NDArray[Any],
    positions: NDArray[np.uint32],
    distances: NDArray[Any],
    magnitude: Any,
    mantissa: Any,
    step: int,
    counts: NDArray[np.int64],
) -> None:
    """Add sampled elements, changes and bits of distances, per exponent of the base, to `counts` (`[3, EXPONENTS]`)."""
    elements, changed, lengths = counts[0], counts[1], counts[2]
    for index in range(0, len(base), step):
        elements[(np.uint64(base[index]) & magnitude) >> mantissa] += 1
    for index in range(len(positions)):
        exponent = (np.uint64(base[positions[index]]) & magnitude) >> mantissa
        changed[exponent] += 1
        rest = np.uint64(distances[index])
        while rest > np.uint64(0):
            lengths[exponent] += 1
            rest >>= np.uint64(1)


@kernel
def _positions_cost(elements: float, changed: float) -> float:
    """Bits for which of `elements` changed."""
    kept = elements - changed
    if changed <= 0.0 or kept <= 0.0:
        return 0.0
    return changed * math.log2(elements / changed) + kept * math.log2(elements / kept)


@kernel
def merge_exponents(counts: NDArray[np.int64], step: int, most: int) -> NDArray[np.int64]:
    """Exponents at which a class begins (the first class begins at 0 and is not listed).

    Neighbours are merged, the cheapest pair first, while there are more than `most` or the sum of the costs falls: bits
    of the positions given the share that changes, a charge for mixing distances of different lengths, and `CLASS_BITS`.
    """
    elements, changed, lengths = counts[0], counts[1], counts[2]
    begin = np.empty(len(elements), np.int64)
    size = np.empty(len(elements))
    moved = np.empty(len(elements))
    mean = np.empty(len(elements))
    count = 0
    for exponent in range(len(elements)):
        if elements[exponent] > 0 or changed[exponent] > 0:
            begin[count] = exponent
            moved[count] = changed[exponent]
            size[count] = max(float(elements[exponent] * step), moved[count])
            mean[count] = lengths[exponent] / max(1.0, moved[count])
            count += 1
    while count > 1:
        best, least = -1, np.inf
        for left in range(count - 1):
            right = left + 1
            both = moved[left] + moved[right]
            cost = _positions_cost(size[left] + size[right], both)
            cost -= _positions_cost(size[left], moved[left]) + _positions_cost(size[right], moved[right])
            cost += 0.5 * moved[left] * moved[right] / max(1.0, both) * (mean[left] - mean[right]) ** 2
            if cost < least:
                best, least = left, cost
        if least > CLASS_BITS and count <= most:
            break
        both = moved[best] + moved[best + 1]
        mean[best] = (mean[best] * moved[best] + mean[best + 1] * moved[best + 1]) / max(1.0, both)
        size[best] += size[best + 1]
        moved[best] = both
        for later in range(best + 1, count - 1):
            begin[later], size[later], moved[later] = begin[later + 1], size[later + 1], moved[later + 1]
            mean[later] = mean[later + 1]
        count -= 1
    return begin[1:count].copy()
