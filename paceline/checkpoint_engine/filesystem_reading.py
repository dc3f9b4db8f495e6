"""From a version's files to tensor bytes. Nothing is reserved before all that is claimed was compared with the files.

Bytes are read in runs of at most 16 MiB, straight to their places, and digested leaf by leaf while they are warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

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
    marker_bytes = read_small(reading, MARKER_NAME, MAX_MARKER_BYTES, where)
    marker = decode_exact(marker_bytes, Marker, f"{where}/{MARKER_NAME}")
    manifest_bytes = read_small(reading, MANIFEST_NAME, MAX_MANIFEST_BYTES, where)
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


def read_small(reading: VersionReading, name: str, limit: int, where: str) -> bytes:
    """A whole file of at most `limit` bytes.

    Raises:
        SyncError: it is larger. FileNotFoundError: it is not there.
    """
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
