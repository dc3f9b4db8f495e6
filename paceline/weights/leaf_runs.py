"""Leaves of many tensors, in few calls of the compiled pass, shared out among threads.

What the pass does not take (a tail that is short or no multiple of a line, a target that begins within one) goes
through xxhash and numpy instead, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.weight_ports import CopyProgress
from paceline.weights.leaf_pass import LEAST_BYTES, LINE_BYTES, LeafRuns, as_bytes, copy_runs, digest_runs, fill_runs
from paceline.weights.tree_digest import LEAF_BYTES, leaf_digest
from paceline.weights.work_sharing import share_out

_RUN_BYTES = 4 * LEAF_BYTES
_FILL_BYTES = 2 * LEAF_BYTES  # at a time: two copies that are as far apart find each other's bytes in the caches
_SHARE_BYTES = 8 * LEAF_BYTES  # of one call

Bytes = NDArray[np.uint8]


def digest_leaves(parts: Sequence[Bytes], threads: int = 1) -> list[bytes]:
    """Of each dense part: its leaf digests one after another, 16 bytes each. A part starts at a leaf."""
    whole = [_before_the_tail(part, 1) for part in parts]
    runs, places = _cut([address_of(part) for part in parts], whole)
    digests = np.empty((places[-1], 2), np.uint64)
    share_out(threads, lambda share: digest_runs(runs.part(*share), digests), _shares(runs))
    raw = as_bytes(digests)
    found = [raw[16 * begin : 16 * end] for begin, end in pairwise(places)]
    return [
        leaves if end == len(part) else leaves + leaf_digest(part[end:].data)
        for part, end, leaves in zip(parts, whole, found, strict=True)
    ]


def copy_leaves(
    pairs: Sequence[tuple[Bytes, Bytes]], mask: np.unsignedinteger[Any], threads: int = 1
) -> list[tuple[bytes, int]]:
    """Copy each (source, target) of dense parts of equal lengths; its digests, and its largest `element & mask`.

    Elements are unsigned, of the mask's type, in the machine's order; lengths are multiples of theirs, unless the mask
    is 0.
    """
    whole = [0 if address_of(target) % LINE_BYTES else _before_the_tail(source, LINE_BYTES) for source, target in pairs]
    runs, places = _cut([address_of(source) for source, _ in pairs], whole)
    targets, _ = _cut([address_of(target) for _, target in pairs], whole)
    digests = np.empty((places[-1], 2), np.uint64)
    largest = np.zeros(len(runs.sources), np.uint64)
    share_out(
        threads,
        lambda share: copy_runs(
            runs.part(*share), targets.sources[slice(*share)], mask, digests, largest[slice(*share)]
        ),
        _shares(runs),
    )
    raw = as_bytes(digests)
    run_at = np.searchsorted(runs.firsts, places)
    results = []
    for number, (source, target) in enumerate(pairs):
        begin, end = places[number], places[number + 1]
        most = int(largest[run_at[number] : run_at[number + 1]].max(initial=0))
        leaves, in_tail = _copy_plainly(source[whole[number] :], target[whole[number] :], mask)
        results.append((raw[16 * begin : 16 * end] + leaves, max(most, in_tail)))
    return results


def fill_leaves(
    pairs: Sequence[tuple[Bytes, Bytes]], threads: int = 1, copies: CopyProgress | None = None
) -> list[bytes]:
    """Copy each (source, target) of dense parts of equal lengths; the leaf digests that the target then has.

    It goes where another of `copies` is, the places being shares of about `_FILL_BYTES`.
    """
    whole = [_before_the_tail(source, 1) for source, _ in pairs]
    runs, places = _cut([address_of(source) for source, _ in pairs], whole, _FILL_BYTES)
    targets, _ = _cut([address_of(target) for _, target in pairs], whole, _FILL_BYTES)
    digests = np.empty((places[-1], 2), np.uint64)
    shares = _shares(runs, _FILL_BYTES)

    def fill(place: int) -> None:
        begin, end = shares[place]
        fill_runs(runs.part(begin, end), targets.sources[begin:end], digests)

    share_out(threads, fill, range(len(shares)) if copies is None else _together(len(shares), copies))
    raw = as_bytes(digests)
    results = []
    for (source, target), done, (begin, end) in zip(pairs, whole, pairwise(places), strict=True):
        leaves = raw[16 * begin : 16 * end]
        if done < len(source):
            np.copyto(target[done:], source[done:])
            leaves += leaf_digest(target[done:].data)
        results.append(leaves)
    return results


def _together(count: int, copies: CopyProgress) -> Iterator[int]:
    """Each of so many places once: the one where another copy is, or else the one behind the last."""
    left = [True] * count
    place = 0
    for _ in range(count):
        hint = copies.place()
        if hint is not None and 0 <= hint < count and left[hint]:
            place = hint
        while not left[place % count]:
            place += 1
        place %= count
        left[place] = False
        copies.tell(place)
        yield place


def address_of(part: Bytes) -> int:
    """Where the bytes of an array begin."""
    address: int = part.__array_interface__["data"][0]
    return address


def _before_the_tail(part: Bytes, unit: int) -> int:
    """Bytes before a last leaf that is too short for the compiled pass, or no multiple of `unit`."""
    tail = len(part) % LEAF_BYTES
    return len(part) - tail if tail < LEAST_BYTES or tail % unit else len(part)


def _cut(addresses: Sequence[int], lengths: Sequence[int], run_bytes: int = _RUN_BYTES) -> tuple[LeafRuns, list[int]]:
    """The runs of all parts, and the number of each part's first leaf and of the one after the last."""
    rows: list[tuple[int, int, int]] = []
    places = [0]
    for address, length in zip(addresses, lengths, strict=True):
        first = places[-1]
        rows += [
            (address + start, min(run_bytes, length - start), first + start // LEAF_BYTES)
            for start in range(0, length, run_bytes)
        ]
        places.append(first + -(-length // LEAF_BYTES))
    table = np.array(rows, np.int64).reshape(-1, 3).T
    return LeafRuns(*(np.ascontiguousarray(column) for column in table)), places


def _shares(runs: LeafRuns, nbytes: int = _SHARE_BYTES) -> list[tuple[int, int]]:
    """Begin and end of the runs of each call, of about so many bytes."""
    total = np.cumsum(runs.lengths)
    cuts = np.searchsorted(total, np.arange(nbytes, int(total[-1]) if len(total) else 0, nbytes)) + 1
    ends = [*dict.fromkeys(cuts.tolist()), len(runs.lengths)]
    return [(begin, end) for begin, end in pairwise([0, *ends]) if end > begin]


def _copy_plainly(source: Bytes, target: Bytes, mask: np.unsignedinteger[Any]) -> tuple[bytes, int]:
    leaves, largest = b"", 0
    for start in range(0, len(source), LEAF_BYTES):
        leaf = source[start : start + LEAF_BYTES]
        leaves += leaf_digest(leaf.data)
        np.copyto(target[start : start + LEAF_BYTES], leaf)
        if mask:
            largest = max(largest, int((leaf.view(mask.dtype) & mask).max()))
    return leaves, largest
