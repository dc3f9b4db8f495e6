"""Where each tensor lies in an arena, and whether a manifest that came from elsewhere may be believed.

Tensors lie dense and row-major, one after the other, at offsets that are multiples of 64 bytes. Only bytes are moved,
so every type, 0-dim and empty tensors included, is laid out alike. A manifest is checked whole before one byte is
reserved, mapped or read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from paceline.core.errors import CoverageError, SyncError
from paceline.core.manifest import (
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    MAX_TENSORS,
    Layout,
    TensorMeta,
    WeightManifest,
    layout_of,
)
from paceline.weights.dtypes import dtype_of

ALIGNMENT = 64
DIGEST_LENGTH = 32
_INT64_MAX = (1 << 63) - 1


def plan_layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[tuple[TensorMeta, ...], int]:
    """Place tensors, given as name -> (dtype, shape), in the mapping's order: `(metas, total_bytes)`.

    `total_bytes` is the end of the last tensor, padding between tensors included.

    Example: `plan_layout({"a": ("float32", (3,)), "b": ("bool", ())})` puts `b` at 64 and ends at 65.
    """
    metas: list[TensorMeta] = []
    end = 0
    for name, (dtype, shape) in tensors.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        meta = TensorMeta(name, dtype, shape, offset, math.prod(shape) * dtype_of(dtype).itemsize)
        _check_bounds(meta)
        metas.append(meta)
        end = offset + meta.nbytes
    if len(metas) > MAX_TENSORS:
        raise SyncError(f"{len(metas)} tensors, at most {MAX_TENSORS} can be sent")
    return tuple(metas), end


def check_manifest(manifest: WeightManifest, capacity: int) -> None:
    """Check everything a manifest claims against itself and against `capacity` bytes of arena.

    Raises:
        CoverageError: a name occurs twice, or an alias points at no stored tensor.
        SyncError: a size, offset, shape, type, length or the digest cannot be right.
    """
    _check_head(manifest, capacity)
    _check_names(manifest)
    _check_places(manifest)


class ManifestCheck:
    """`check_manifest` of one version after another: names and places as in the last one are not checked again."""

    def __init__(self) -> None:
        self._checked: Layout | None = None

    def __call__(self, manifest: WeightManifest, capacity: int) -> None:
        """Raises what `check_manifest` raises."""
        _check_head(manifest, capacity)
        layout = layout_of(manifest)
        if layout != self._checked:
            _check_names(manifest)
            _check_places(manifest)
            self._checked = layout


def _check_head(manifest: WeightManifest, capacity: int) -> None:
    """Of everything but names and places."""
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.aliases) > MAX_TENSORS:
        raise SyncError(f"a manifest of {len(manifest.tensors)} tensors, at most {MAX_TENSORS} are accepted")
    if not 0 <= manifest.version <= _INT64_MAX or not 0 <= manifest.total_bytes <= capacity:
        raise SyncError(
            f"manifest of version {manifest.version} claims {manifest.total_bytes} bytes of an arena of {capacity}"
        )
    if not _is_digest(manifest.digest):
        raise SyncError(f"manifest of version {manifest.version} has no valid digest")
    for meta in manifest.tensors:
        if meta.digest and not _is_digest(meta.digest):
            raise SyncError(f"tensor {meta.name!r} has no valid digest")


def _is_digest(text: str) -> bool:
    return len(text) == DIGEST_LENGTH and not text.strip("0123456789abcdef")


def view_of(buffer: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor at its place in `buffer` (uint8, one-dimensional): a view, nothing is copied."""
    raw = buffer[meta.offset : meta.offset + meta.nbytes]
    return raw.view(dtype_of(meta.dtype)).view(meta.shape)


def stored_views(buffer: torch.Tensor, tensors: Iterable[TensorMeta]) -> dict[str, torch.Tensor]:
    """Each of these at its place in `buffer`, as `view_of` does it, but in one step of torch each."""
    typed: dict[str, tuple[torch.Tensor, int, int]] = {}  # all elements, where they begin in the storage, bytes of one
    views: dict[str, torch.Tensor] = {}
    for meta in tensors:
        if meta.dtype not in typed:
            size = dtype_of(meta.dtype).itemsize
            whole = buffer[: buffer.numel() // size * size].view(dtype_of(meta.dtype))
            typed[meta.dtype] = (whole, int(whole.storage_offset()), size)
        elements, begin, size = typed[meta.dtype]
        views[meta.name] = elements.as_strided(meta.shape, _row_major(meta.shape), begin + meta.offset // size)
    return views


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return strides[::-1]


def views_of(buffer: torch.Tensor, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Every name, aliases included, as a view of `buffer`; an alias shares the storage of its stored tensor."""
    views = stored_views(buffer, manifest.tensors)
    views.update({alias: views[stored] for alias, stored in manifest.aliases.items()})
    return views


def _check_names(manifest: WeightManifest) -> None:
    names = [meta.name for meta in manifest.tensors] + list(manifest.aliases)
    seen: set[str] = set()
    doubled = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if doubled:
        raise CoverageError(f"manifest names tensors twice: {', '.join(map(repr, sorted(doubled)))}")
    stored = {meta.name for meta in manifest.tensors}
    lost = sorted(f"{alias!r} -> {target!r}" for alias, target in manifest.aliases.items() if target not in stored)
    if lost:
        raise CoverageError(f"manifest has aliases of tensors that it does not have: {', '.join(lost)}")
    for alias in manifest.aliases:
        _check_name(alias)


def _check_places(manifest: WeightManifest) -> None:
    for meta in manifest.tensors:
        _check_bounds(meta)
        expected = math.prod(meta.shape) * dtype_of(meta.dtype).itemsize
        if meta.nbytes != expected:
            raise SyncError(
                f"tensor {meta.name!r} claims {meta.nbytes} bytes, {meta.dtype} {meta.shape} has {expected}"
            )
        if meta.offset < 0 or meta.offset % ALIGNMENT or meta.offset + meta.nbytes > manifest.total_bytes:
            raise SyncError(f"tensor {meta.name!r} claims offset {meta.offset} in {manifest.total_bytes} bytes")
    end, last = 0, ""
    for meta in sorted((meta for meta in manifest.tensors if meta.nbytes), key=lambda meta: meta.offset):
        if meta.offset < end:
            raise SyncError(f"tensors {last!r} and {meta.name!r} overlap at offset {meta.offset}")
        end, last = meta.offset + meta.nbytes, meta.name


def _check_bounds(meta: TensorMeta) -> None:
    _check_name(meta.name)
    # An empty tensor has strides too, so its other sizes have to fit as well.
    if (
        len(meta.shape) > MAX_DIMENSIONS
        or any(size < 0 for size in meta.shape)
        or math.prod(max(1, size) for size in meta.shape) > _INT64_MAX
    ):
        raise SyncError(f"tensor {meta.name!r} has a shape that is not accepted: {meta.shape}")


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise SyncError(f"a tensor name of {len(name)} characters, 1 to {MAX_NAME_LENGTH} are accepted")
