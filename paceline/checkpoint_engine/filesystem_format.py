"""What a version on a file system consists of, and whether a version that came from elsewhere may be believed.

    <root>/paceline-weights.json            stamp: this directory belongs to weight versions
    <root>/<life>.<n>/weights-00001-of-00002.safetensors, ...
    <root>/<life>.<n>/delta.bin             where there is one: `weights.delta`, against an earlier version
    <root>/<life>.<n>/manifest.json         `StoredManifest`
    <root>/<life>.<n>/COMPLETE              `Marker`, written last: without it there is no version

A version has shards (kind `full`), a delta (kind `delta`), or both (kind `full`). A shard holds consecutive tensors of
the manifest. Its header is a function of the manifest, so a reader compares bytes and parses no header; every byte of a
version is covered by the marker. JSON is accepted in one spelling only: what
decodes must encode to the same bytes, which rules out double keys, blanks and unknown fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import xxhash
from msgspec.structs import replace

from paceline.checkpoint_engine.filesystem_storage import FORMAT, Format, decode_exact
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.weights.dtypes import dtype_of
from paceline.weights.layout import check_manifest, plan_layout
from paceline.weights.tree_digest import root_digest

DELTA_NAME = "delta.bin"
MAX_MARKER_BYTES = 4096
# A delta is at most as long as the full version, or, of a tiny model, as its own header.
LEAST_DELTA_BYTES = 1 << 16
MAX_MANIFEST_BYTES = 128 << 20
# Keeps a shard's header below the 100 MB that safetensors accepts, at the longest names.
MAX_SHARD_TENSORS = 2000
_HEADER_ALIGNMENT = 64
_RESERVED_NAME = "__metadata__"
# Codes that every safetensors release of the supported range can load with torch. Others are carried as raw bytes
# (U8, one dimension); their type and shape stand in the manifest alone.
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version is whole; its manifest has this many bytes and this xxh3-128 (hex)."""

    format: Format
    manifest_bytes: int
    manifest_digest: str


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: the next `tensors` tensors of the manifest, `nbytes` bytes with its header."""

    name: str
    tensors: int
    nbytes: int


class StoredManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor of `weights` has its digest. `weights.address` is "": a root may be reached under other URLs. `kind`
    is `delta` when the version can be read by its delta alone; then there are no shards.
    """

    format: Format
    kind: Literal["full", "delta"]
    weights: WeightManifest
    shards: tuple[ShardFile, ...]


class Shard(msgspec.Struct, frozen=True):
    """A shard as its tensors determine it: `places` are (tensor, start in the file), in the file's order."""

    header: bytes
    places: tuple[tuple[TensorMeta, int], ...]
    nbytes: int


def plan_shards(tensors: Sequence[TensorMeta], shard_bytes: int) -> list[tuple[TensorMeta, ...]]:
    """Cut the manifest's order into shards of at most `shard_bytes` of data; a larger tensor has a shard of its own."""
    shards: list[tuple[TensorMeta, ...]] = []
    current: list[TensorMeta] = []
    size = 0
    for meta in tensors:
        if current and (size + meta.nbytes > shard_bytes or len(current) == MAX_SHARD_TENSORS):
            shards.append(tuple(current))
            current, size = [], 0
        current.append(meta)
        size += meta.nbytes
    shards.append(tuple(current))
    return shards


def shard_of(tensors: Sequence[TensorMeta]) -> Shard:
    """Header and places of a shard: wider types first, so that each tensor starts at a multiple of its item size.

    Raises:
        SyncError: a tensor has the one name that the format keeps for itself.
    """
    entries: dict[str, dict[str, object]] = {}
    starts: list[tuple[TensorMeta, int]] = []
    end = 0
    for meta in sorted(tensors, key=lambda meta: -dtype_of(meta.dtype).itemsize):
        if meta.name == _RESERVED_NAME:
            raise SyncError(f"a tensor cannot be stored as {_RESERVED_NAME!r}: safetensors keeps that name for itself")
        code = _CODES.get(meta.dtype)
        shape = [meta.nbytes] if code is None else list(meta.shape)
        entries[meta.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [end, end + meta.nbytes]}
        starts.append((meta, end))
        end += meta.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return Shard(header, tuple((meta, len(header) + start) for meta, start in starts), len(header) + end)


def shard_name(index: int, count: int) -> str:
    """Example: `shard_name(0, 2) == "weights-00001-of-00002.safetensors"`."""
    return f"weights-{index + 1:05d}-of-{count:05d}.safetensors"


def encode_stored(stored: StoredManifest) -> tuple[bytes, bytes]:
    """The bytes of `manifest.json` and of the marker.

    Raises:
        SyncError: the manifest would be larger than readers accept.
    """
    manifest = msgspec.json.encode(stored)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise SyncError(f"a manifest of {len(manifest)} bytes, at most {MAX_MANIFEST_BYTES} can be stored")
    marker = Marker(FORMAT, len(manifest), xxhash.xxh3_128_hexdigest(manifest))
    return manifest, msgspec.json.encode(marker)


def decode_stored(data: bytes, marker: Marker, what: str) -> StoredManifest:
    """Decode `manifest.json` and check all that it claims; files are compared by whoever reads them.

    Raises:
        DigestMismatch: the bytes are not those that the marker or the tensor digests name.
        SyncError: it is no manifest, or contradicts itself.
    """
    if xxhash.xxh3_128_hexdigest(data) != marker.manifest_digest:
        raise DigestMismatch(f"{what} is not the manifest that its marker names")
    stored = decode_exact(data, StoredManifest, what)
    weights = stored.weights
    check_manifest(weights, weights.total_bytes)
    if stored.kind == "delta" and (weights.delta is None or stored.shards):
        raise SyncError(f"{what} says that it is a delta, but has none or shards as well")
    _check_layout(weights, what)
    _check_delta(weights, what)
    if stored.kind == "full":
        _check_shards(stored, what)
    _check_digests(stored, what)
    return stored


def announced(weights: WeightManifest, url: str) -> WeightManifest:
    """A stored manifest as it travels: with the URL of the root at which it lies."""
    return replace(weights, address=url)


def shards_of(stored: StoredManifest) -> list[tuple[str, Shard]]:
    """Names and shards of a checked manifest."""
    found: list[tuple[str, Shard]] = []
    first = 0
    for file in stored.shards:
        found.append((file.name, shard_of(stored.weights.tensors[first : first + file.tensors])))
        first += file.tensors
    return found


def _check_layout(weights: WeightManifest, what: str) -> None:
    """No gaps: a manifest must not ask for more memory than its tensors take."""
    planned, total_bytes = plan_layout({meta.name: (meta.dtype, meta.shape) for meta in weights.tensors})
    offsets = [meta.offset for meta in weights.tensors]
    if weights.total_bytes != total_bytes or offsets != [meta.offset for meta in planned]:
        raise SyncError(f"{what} does not lay its tensors out one after the other in {total_bytes} bytes")


def _check_delta(weights: WeightManifest, what: str) -> None:
    delta = weights.delta
    if delta is None:
        return
    if not 0 <= delta.base_version < weights.version or (delta.arena_id, delta.offset) != (weights.arena_id, 0):
        raise SyncError(f"{what} has a delta against version {delta.base_version} at {delta.arena_id!r}")
    if not 0 < delta.nbytes <= max(weights.total_bytes, LEAST_DELTA_BYTES):
        raise SyncError(f"{what} claims a delta of {delta.nbytes} bytes for {weights.total_bytes}")


def _check_shards(stored: StoredManifest, what: str) -> None:
    counts = [file.tensors for file in stored.shards]
    if sum(counts) != len(stored.weights.tensors) or not all(0 < count <= MAX_SHARD_TENSORS for count in counts):
        raise SyncError(f"{what} does not give each tensor one shard")
    for index, (file, (_, shard)) in enumerate(zip(stored.shards, shards_of(stored), strict=True)):
        if file.name != shard_name(index, len(counts)):
            raise SyncError(f"{what} names a shard {file.name!r}, not {shard_name(index, len(counts))!r}")
        if file.nbytes != shard.nbytes:
            raise SyncError(f"{what} claims {file.nbytes} bytes for {file.name}, its tensors take {shard.nbytes}")


def _check_digests(stored: StoredManifest, what: str) -> None:
    weights = stored.weights
    if not all(meta.digest for meta in weights.tensors):
        raise SyncError(f"{what} does not give each tensor a digest")
    entries = {meta.name: (meta.dtype, meta.shape, bytes.fromhex(meta.digest)) for meta in weights.tensors}
    if root_digest(entries, weights.aliases) != weights.digest:
        raise DigestMismatch(f"{what}: the tensor digests do not add up to {weights.digest}")
