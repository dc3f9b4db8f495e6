"""The receiver's side, first half: from the payload of a run, and the base, to positions and distances.

Pure: nothing of the receiver's tensors is written, so a payload that lies is refused before anything has changed.
Memory per change: 4 bytes for the position, the element's width for the distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import SyncError
from paceline.weights.delta import classes, entropy, message, scan, tables
from paceline.weights.delta.message import DeltaHeader, Run
from paceline.weights.delta.number_line import NumberLine

_START_STATE = 1 << 16


@dataclass(frozen=True)
class Changes:
    """Positions within a run, each once, and zigzag distances on the number line."""

    positions: NDArray[np.uint32]
    distances: NDArray[Any]


@dataclass(frozen=True)
class Flips:
    """Bits to invert, for each element of a run."""

    bits: NDArray[Any]


class RunDecoder:
    """Decodes the runs of one delta; its frequency tables are unpacked once."""

    def __init__(self, header: DeltaHeader) -> None:
        self._tables = [
            (
                [tables.slot_table(tables.unpack(packed)) for packed in table_set.gaps],
                [tables.slot_table(tables.unpack(packed)) for packed in table_set.distances],
            )
            for table_set in header.table_sets
        ]

    def decode(self, run: Run, payload: memoryview, base: NDArray[Any], line: NumberLine) -> Changes | Flips:
        """What the run does to `base` (its bits in the base version, 1-D), which is read for its classes.

        Raises:
            SyncError: the payload is not what an encoder writes for such a base.
        """
        if run.mode != message.SPARSE:
            raw = payload if run.mode == message.DENSE else memoryview(message.unzstd(payload, base.nbytes))
            return Flips(np.frombuffer(raw, line.unsigned, len(base)))
        ranks, distances = self._symbols(run, payload, len(base), line)
        if not run.edges:
            return Changes(ranks, distances)
        positions, ordered = np.empty_like(ranks), np.empty_like(distances)
        counts = np.array(run.counts, np.int64)
        bounds = classes.bounds_of(run.edges, line)
        magnitude = classes.magnitude_bits(line)
        placed = scan.place_changes(base, bounds, magnitude, counts, ranks, distances, positions, ordered)
        if placed != run.changed:
            raise SyncError(f"{run.changed - placed} changes of a delta have no place in the base")
        return Changes(positions, ordered)

    def _symbols(
        self, run: Run, payload: memoryview, elements: int, line: NumberLine
    ) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        gap_tables, distance_tables = self._tables[run.table_set]
        words = np.frombuffer(payload, "<u2", run.words).astype(np.uint16)
        plain = np.frombuffer(payload[2 * run.words :].tobytes(), "<u4").astype(np.uint32)
        start = [int(words[0]) << 16 | int(words[1]), int(words[2]) << 16 | int(words[3])]
        state = np.array([4, *start, 0, 0, 0], np.uint64)
        ranks, distances = np.empty(run.changed, np.uint32), np.empty(run.changed, line.unsigned)
        first = 0
        sound = True
        for k, count in enumerate(run.counts):
            part = slice(first, first + count)
            gap_slots, distance_slots = gap_tables[run.tables[2 * k]], distance_tables[run.tables[2 * k + 1]]
            sound = sound and entropy.decode(
                words, plain, gap_slots, distance_slots, elements, state, ranks[part], distances[part]
            )
            first += count
        ends = [int(value) for value in state[:4]]
        if not sound or ends != [len(words), _START_STATE, _START_STATE, len(plain)]:
            raise SyncError("the payload of a delta is not what an encoder writes")
        return ranks, distances
