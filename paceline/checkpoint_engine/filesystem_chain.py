"""How a reader gets to a version: from files that hold it whole, or over a chain of deltas, whichever is fewer bytes.

A chain starts at what the reader serves, or at the nearest full version before. Every link is opened before a byte is
read; where the storage has locks, none can be removed until all are applied. What comes out is proved by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from paceline.checkpoint_engine.delta_staging import read_announced, stored_tensors
from paceline.checkpoint_engine.filesystem_format import DELTA_NAME, StoredManifest
from paceline.checkpoint_engine.filesystem_reading import check_files, read_small, read_stored, read_tensors
from paceline.checkpoint_engine.filesystem_storage import VersionReading, VersionStorage
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import DeltaRecord, WeightManifest
from paceline.core.version import Version
from paceline.core.weight_ports import StagedWeights
from paceline.weights.delta import Delta, apply, copy_and_apply, prepare
from paceline.weights.digest import digest_each
from paceline.weights.layout import view_of


@dataclass(frozen=True)
class Link:
    """One version's directory, open; `where` names it in errors."""

    where: str
    stored: StoredManifest
    reading: VersionReading

    def read_delta(self, record: DeltaRecord) -> Delta:
        """Its delta, checked.

        Raises:
            DigestMismatch, SyncError: it is not what was announced.
        """
        data = read_small(self.reading, DELTA_NAME, record.nbytes, self.where)
        if len(data) != record.nbytes:
            raise DigestMismatch(f"{self.where}/{DELTA_NAME} has {len(data)} bytes, the manifest names {record.nbytes}")
        return read_announced(data, record, self.stored.weights)


@dataclass(frozen=True)
class Chain:
    """Read `full` (None: begin with what is served), then apply `deltas`, oldest first. `nbytes` is what that takes."""

    full: Link | None
    deltas: tuple[tuple[Link, DeltaRecord], ...]
    nbytes: int


def open_chain(storage: VersionStorage, name: Version, base: WeightManifest | None, held: ExitStack) -> Chain:
    """The cheapest way to a version, its links open until `held` ends.

    Raises:
        FileNotFoundError: the version, or what its deltas need, is not there.
        SyncError, DigestMismatch: a manifest cannot be right.
    """
    deltas: list[tuple[Link, DeltaRecord]] = []
    found: list[Chain] = []
    spent = 0
    while True:
        where = f"{storage.url}/{name}"
        try:
            reading = held.enter_context(storage.reading(name))
        except FileNotFoundError:
            if found:
                break
            raise
        link = Link(where, read_stored(reading, where), reading)
        weights = link.stored.weights
        if weights.version != name.packed or (deltas and weights.digest != deltas[-1][1].base_digest):
            raise DigestMismatch(f"{where} is not the version that the delta after it was made against")
        if link.stored.kind == "full":
            found.append(Chain(link, tuple(reversed(deltas)), spent + weights.total_bytes))
        record = weights.delta
        if record is None or (found and (base is None or spent + record.nbytes >= found[-1].nbytes)):
            break
        deltas.append((link, record))
        spent += record.nbytes
        if base is not None and (base.version, base.digest) == (record.base_version, record.base_digest):
            found.append(Chain(None, tuple(reversed(deltas)), spent))
            break
        if found and base is not None and record.base_version < base.version:
            break
        name = Version.unpack(record.base_version)
    return min(found, key=lambda chain: chain.nbytes)


def read_chain(
    chain: Chain, base: StagedWeights | None, buffer: torch.Tensor, check_time: Callable[[], None], threads: int
) -> dict[str, bytes]:
    """Bring `buffer` (uint8) to the chain's end; returns the digests of the tensors as they then are.

    Raises:
        DigestMismatch, CoverageError, SyncError: a file is not what its manifest says.
    """
    digests: dict[str, bytes] = {}
    deltas = list(chain.deltas)
    last = deltas[-1][0] if deltas else chain.full
    assert last is not None, "a chain has a link"
    target = {meta.name: view_of(buffer, meta) for meta in last.stored.weights.tensors}
    if chain.full is not None:
        _check_same_layout(chain.full, last)
        check_files(chain.full.reading, chain.full.stored, chain.full.where)
        digests = read_tensors(chain.full.reading, chain.full.stored, buffer, check_time, threads)
    elif base is not None:
        (first, record), *deltas = deltas
        held = stored_tensors(base)
        copy_and_apply(first.read_delta(record), held, target, base_digest=record.base_digest, threads=threads)
    for link, record in deltas:
        check_time()
        prepared = prepare(link.read_delta(record), target, base_digest=record.base_digest, threads=threads)
        apply(prepared, target, prepared.cursor(), threads)
    return digest_each(target, threads) if chain.deltas else digests


def _check_same_layout(first: Link, last: Link) -> None:
    places = [
        [(meta.name, meta.dtype, meta.shape, meta.offset) for meta in link.stored.weights.tensors]
        for link in (first, last)
    ]
    if places[0] != places[1]:
        raise SyncError(f"{last.where} does not have the tensors of {first.where}, from which its deltas begin")
