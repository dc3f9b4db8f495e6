"""From a version's files to tensor bytes. Nothing is reserved before all that is claimed was compared with the files.

Bytes are read in runs of at most 16 MiB, straight to their places, and digested leaf by leaf while they are warm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.checkpoint_engine.filesystem_format import (
    MAX_MANIFEST_BYTES,
    MAX_MARKER_BYTES,
    Marker,
    Shard,
    StoredManifest,
    decode_stored,
    shards_of,
)
from paceline.checkpoint_engine.filesystem_storage import (
    MANIFEST_NAME,
    MARKER_NAME,
    StoredFile,
    VersionReading,
    decode_exact,
)
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import TensorMeta
from paceline.store.capacity import check_memory
from paceline.weights.layout import ALIGNMENT
from paceline.weights.tree_digest import leaf_digests, tensor_digest

RUN_BYTES = 16 << 20
# The kernel takes at most 1024 targets per read.
RUN_PIECES = 512


@dataclass
class _Run:
    """Bytes that follow each other in a file: `pieces` are (tensor, first byte of it, last byte of it + 1)."""

    offset: int
    nbytes: int = 0
    pieces: list[tuple[TensorMeta, int, int]] = field(default_factory=list)


def read_stored(reading: VersionReading, where: str) -> StoredManifest:
    """Marker and manifest of a version, checked; `where` names the version's directory.

    Raises:
        SyncError, DigestMismatch: they cannot be right. FileNotFoundError: they are not there.
    """
    marker_bytes = _read_small(reading, MARKER_NAME, MAX_MARKER_BYTES, where)
    marker = decode_exact(marker_bytes, Marker, f"{where}/{MARKER_NAME}")
    manifest_bytes = _read_small(reading, MANIFEST_NAME, MAX_MANIFEST_BYTES, where)
    if len(manifest_bytes) != marker.manifest_bytes:
        raise DigestMismatch(
            f"{where}/{MANIFEST_NAME} has {len(manifest_bytes)} bytes, its marker names {marker.manifest_bytes}"
        )
    return decode_stored(manifest_bytes, marker, f"{where}/{MANIFEST_NAME}")


def check_files(reading: VersionReading, stored: StoredManifest, where: str) -> None:
    """Compare every shard's size and header with the manifest.

    Raises:
        DigestMismatch: a file is not what the manifest says. FileNotFoundError: a file is not there.
    """
    for name, shard in shards_of(stored):
        with reading.open(name) as file:
            if file.size != shard.nbytes:
                raise DigestMismatch(f"{where}/{name} has {file.size} bytes, the manifest names {shard.nbytes}")
            header = bytearray(len(shard.header))
            file.read_into(0, [memoryview(header)])
            if header != shard.header:
                raise DigestMismatch(f"{where}/{name}: the header is not the one of the manifest's tensors")


def read_tensors(
    reading: VersionReading, stored: StoredManifest, buffer: torch.Tensor, check_time: Callable[[], None], threads: int
) -> dict[str, bytes]:
    """Copy all tensors to their offsets in `buffer` (uint8) and return their digests by name.

    `check_time` is called before each run and may raise.
    """
    memory = memoryview(buffer.numpy().data)
    leaves: dict[str, list[bytes]] = {meta.name: [] for meta in stored.weights.tensors}
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="paceline-read") as pool:
        for name, shard in shards_of(stored):
            with reading.open(name) as file:
                runs = list(_runs(shard))

                def read(run: _Run, file: StoredFile = file) -> list[list[bytes]]:
                    check_time()
                    return _read_run(file, run, memory)

                for run, digests in zip(runs, map(read, runs) if threads <= 1 else pool.map(read, runs), strict=True):
                    for (meta, _, _), found in zip(run.pieces, digests, strict=True):
                        leaves[meta.name] += found
    return {name: tensor_digest(parts) for name, parts in leaves.items()}


class Buffers:
    """Memory to read into. What no tensor refers to any more is handed out again: touching a fresh page costs several
    times as much as filling a warm one. At most one buffer waits for its next use.
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


def _read_small(reading: VersionReading, name: str, limit: int, where: str) -> bytes:
    with reading.open(name) as file:
        if file.size > limit:
            raise SyncError(f"{where}/{name} has {file.size} bytes, at most {limit} are accepted")
        data = bytearray(file.size)
        file.read_into(0, [memoryview(data)])
    return bytes(data)


def _runs(shard: Shard) -> Iterator[_Run]:
    """Cut a shard's data into runs; a tensor is cut at multiples of `RUN_BYTES` (whole leaves) from its start."""
    run = _Run(len(shard.header))
    for meta, place in shard.places:
        for start in range(0, meta.nbytes, RUN_BYTES):
            stop = min(start + RUN_BYTES, meta.nbytes)
            if run.pieces and (run.nbytes + stop - start > RUN_BYTES or len(run.pieces) == RUN_PIECES):
                yield run
                run = _Run(place + start)
            run.pieces.append((meta, start, stop))
            run.nbytes += stop - start
    if run.pieces:
        yield run


def _read_run(file: StoredFile, run: _Run, buffer: memoryview) -> list[list[bytes]]:
    targets = [buffer[meta.offset + start : meta.offset + stop] for meta, start, stop in run.pieces]
    file.read_into(run.offset, targets)
    return [leaf_digests(target) for target in targets]
