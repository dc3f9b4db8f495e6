"""The bytes of a delta: magic, lengths, a header (msgpack, zstd), then the payloads of the changed runs.

    8 bytes magic | u32 compressed length of the header | u32 its plain length | u64 xxh3 of it | header | body

Nothing is unpickled. Every size is checked against what was received, and against the bounds below, before memory is
reserved for it. Tensors are not named: they are those of the base in the order of their names, and `layout` proves that
both sides mean the same. A tensor is cut into runs of `RUN_ELEMENTS`, each coded by itself; unchanged runs are absent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch
import xxhash
import zstandard

from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.core.manifest import MAX_TENSORS
from paceline.weights.delta.classes import EXPONENTS, MAX_CLASSES
from paceline.weights.delta.entropy import EXTRA_WORDS
from paceline.weights.delta.number_line import line_of
from paceline.weights.delta.planes import Level
from paceline.weights.dtypes import dtype_name

MAGIC = b"PACEDLT1"
RUN_ELEMENTS = 1 << 22
MAX_HEADER_BYTES = 1 << 28
SPARSE, DENSE, DENSE_ZSTD = 0, 1, 2
_PREFIX = struct.Struct("<8sIIQ")
_HEX = frozenset("0123456789abcdef")
_DIGEST_LENGTH = 32


class Run(msgspec.Struct, frozen=True, array_like=True):
    """One changed run of elements. `tensor` counts names in sorted order, `start` is in runs.

    Sparse: `counts` changes per class, `edges` exponents at which classes begin, `tables` pairs of indices of a gap
    table and a distance table, per class; the payload is `words` 16-bit words, then 32-bit words of plain bits. Dense:
    `counts` has the number of changes, the payload is base XOR target, raw or as one zstd frame.

    Example: `Run(7, 0, 0, 412, 120, (118,), (310, 12), b"\\x00\\x01\\x00\\x02", 0)`.
    """

    tensor: int
    start: int
    mode: int
    nbytes: int
    words: int
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    tables: bytes
    table_set: int

    @property
    def changed(self) -> int:
        """How many elements changed."""
        return sum(self.counts)


class TableSet(msgspec.Struct, frozen=True, array_like=True):
    """Frequency tables (see `tables.pack`) that the runs of one set share."""

    gaps: tuple[bytes, ...]
    distances: tuple[bytes, ...]


class DeltaHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a delta is, and what it must be applied to. Digests are hex: roots of the tree digest, and of the body.

    `layout` digests names, types and shapes. `total` and `changed` count elements (halves of complex ones).
    """

    level: Level
    base_version: int
    version: int
    base_digest: str
    target_digest: str
    layout: str
    run_elements: int
    total: int
    changed: int
    full_bytes: int
    body_bytes: int
    body_digest: str
    table_sets: tuple[TableSet, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Delta:
    """A delta that was read: its header, and its body as a view of what was received."""

    header: DeltaHeader
    body: memoryview


def layout_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest of names, types and shapes, whatever their order."""
    entries = [(name, dtype_name(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(entries))


def write_delta(header: DeltaHeader, payloads: Iterable[bytes]) -> bytes:
    """The whole message."""
    plain = msgspec.msgpack.encode(header)
    packed = zstandard.ZstdCompressor(level=9).compress(plain)
    return b"".join([_PREFIX.pack(MAGIC, len(packed), len(plain), xxhash.xxh3_64_intdigest(plain)), packed, *payloads])


def decode_header(data: bytes | memoryview) -> DeltaHeader:
    """The header alone, checked; the body need not have arrived.

    Raises:
        SyncError: not a delta, cut short, or a header that claims what cannot be.
    """
    return _read_header(memoryview(data))[0]


def read_delta(data: bytes | memoryview) -> Delta:
    """Header and body, checked against each other and against the body's digest.

    Raises:
        SyncError: not a delta, cut short, or a header that claims what cannot be.
        DigestMismatch: the body is not what was written.
    """
    view = memoryview(data)
    header, end = _read_header(view)
    if len(view) - end != header.body_bytes:
        raise SyncError(f"a delta with {len(view) - end} bytes of body, its header claims {header.body_bytes}")
    if xxhash.xxh3_128_hexdigest(view[end:]) != header.body_digest:
        raise DigestMismatch(f"the body of the delta of version {header.version} is not what was written")
    return Delta(header, view[end:])


def check_base(header: DeltaHeader, tensors: Mapping[str, torch.Tensor], base_digest: str) -> None:
    """Check that a delta is for these tensors with this content, before anything is touched.

    Raises:
        DigestMismatch: `base_digest`, the proved digest of the receiver's tensors, is not the delta's base.
        CoverageError: names, types or shapes are not the sender's.
        SyncError: a run lies outside of its tensor or claims more changes than it has elements.
    """
    if base_digest != header.base_digest:
        raise DigestMismatch(
            f"the delta of version {header.version} is for a base with digest {header.base_digest}, not {base_digest}"
        )
    if layout_digest(tensors) != header.layout:
        raise CoverageError(f"the tensors are not those that the delta of version {header.version} was made for")
    names = sorted(tensors)
    for run in header.runs:
        name = names[run.tensor] if run.tensor < len(names) else ""
        elements = run_length(tensors[name], run.start, header.run_elements) if name else 0
        raw = elements * line_of(tensors[name].dtype).width if name else 0
        classed = line_of(tensors[name].dtype).mantissa is not None if name else False
        if not 0 < run.changed <= elements or run.nbytes > raw or (run.edges and not classed):
            raise SyncError(f"the delta claims {run.changed} changes in {elements} elements of {name!r}")
        if run.mode == DENSE and run.nbytes != raw:
            raise SyncError(f"the delta has {run.nbytes} dense bytes for {raw} bytes of {name!r}")


def run_length(tensor: torch.Tensor, start: int, run_elements: int) -> int:
    """Elements (halves of complex ones) of run number `start` of a tensor; 0 or less past its end."""
    return min(run_elements, tensor.numel() * (2 if tensor.is_complex() else 1) - start * run_elements)


def _read_header(view: memoryview) -> tuple[DeltaHeader, int]:
    if len(view) < _PREFIX.size:
        raise SyncError(f"a delta of {len(view)} bytes is cut short")
    magic, packed_bytes, plain_bytes, proof = _PREFIX.unpack_from(view)
    end = _PREFIX.size + packed_bytes
    if magic != MAGIC:
        raise SyncError("not a delta of this format")
    if end > len(view) or plain_bytes > MAX_HEADER_BYTES:
        raise SyncError(f"a delta of {len(view)} bytes claims a header of {packed_bytes} ({plain_bytes} unpacked)")
    plain = unzstd(view[_PREFIX.size : end], plain_bytes)
    if xxhash.xxh3_64_intdigest(plain) != proof:
        raise DigestMismatch("the header of a delta is not what was written")
    try:
        header = msgspec.msgpack.decode(plain, type=DeltaHeader)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SyncError(f"the header of a delta cannot be read: {error}") from error
    _check_header(header)
    return header, end


def unzstd(packed: memoryview, size: int) -> bytes:
    """Unpack one zstd frame that must hold exactly `size` bytes; the frame's own claim is checked first.

    Raises:
        SyncError: it does not.
    """
    try:
        claimed = zstandard.get_frame_parameters(packed).content_size
        plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size) if claimed == size else b""
    except zstandard.ZstdError as error:
        raise SyncError(f"a zstd frame of the delta cannot be read: {error}") from error
    if claimed != size or len(plain) != size:
        raise SyncError(f"a zstd frame of the delta claims {claimed} bytes, {size} are due")
    return plain


def _check_header(header: DeltaHeader) -> None:
    digests = (header.base_digest, header.target_digest, header.layout, header.body_digest)
    if any(len(digest) != _DIGEST_LENGTH or not set(digest) <= _HEX for digest in digests):
        raise SyncError("the header of a delta has no valid digests")
    counted = (header.base_version, header.version, header.total, header.changed, header.full_bytes, header.body_bytes)
    if min(counted) < 0 or not 0 < header.run_elements <= RUN_ELEMENTS:
        raise SyncError(f"a delta claims versions or sizes {counted}, runs of {header.run_elements}")
    last = (-1, 0)
    for run in header.runs:
        if (run.tensor, run.start) <= last or run.tensor > MAX_TENSORS:
            raise SyncError("the runs of a delta are not in order")
        last = (run.tensor, run.start)
        _check_run(run, header)
    if sum(run.nbytes for run in header.runs) != header.body_bytes:
        raise SyncError("the runs of a delta do not add up to its body")
    if sum(run.changed for run in header.runs) != header.changed or header.changed > header.total:
        raise SyncError("the runs of a delta do not add up to its changes")


def _check_run(run: Run, header: DeltaHeader) -> None:
    if min((run.tensor, run.start, run.nbytes, run.words, run.table_set, *run.counts), default=0) < 0:
        raise SyncError("a run of a delta has a negative size")
    if run.mode in (DENSE, DENSE_ZSTD):
        if run.edges or run.words or run.tables or len(run.counts) != 1:
            raise SyncError("a dense run of a delta has parts of a sparse one")
        return
    plain = run.nbytes - 2 * run.words
    classes = len(run.edges) + 1
    if run.mode != SPARSE or classes > MAX_CLASSES or len(run.counts) != classes or len(run.tables) != 2 * classes:
        raise SyncError("a run of a delta has no mode or not as many parts as classes")
    if list(run.edges) != sorted(set(run.edges)) or any(not 0 < edge < EXPONENTS for edge in run.edges):
        raise SyncError("the classes of a run are not in order")
    if run.words < 4 or plain < 0 or plain % 4 or plain > 4 * EXTRA_WORDS * run.changed or run.table_set >= len(
        header.table_sets
    ):  # fmt: skip
        raise SyncError("a run of a delta claims a size that its changes cannot have")
    known = header.table_sets[run.table_set]
    if max(run.tables[::2]) >= len(known.gaps) or max(run.tables[1::2]) >= len(known.distances):
        raise SyncError("a run of a delta names a table that is not there")


def full_bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
