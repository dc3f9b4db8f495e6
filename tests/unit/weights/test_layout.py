"""Layout: where tensors lie, and that a manifest which lies is refused before anything is reserved."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from paceline.core.errors import CoverageError, SyncError
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.weights.dtypes import dtype_name, dtype_of, is_castable
from paceline.weights.layout import ManifestCheck, check_manifest, plan_layout, stored_views, view_of, views_of


def manifest() -> WeightManifest:
    tensors, total = plan_layout({"a": ("float32", (3,)), "b": ("bool", ()), "c": ("bfloat16", (0, 3))})
    return WeightManifest(1, tensors, {"d": "a"}, total, "0" * 32, "arena", "address")


def test_offsets_are_aligned_and_the_end_is_counted() -> None:
    shapes = {"a": ("float32", (3,)), "b": ("bool", ()), "e": ("int8", (0, 3)), "c": ("uint64", (2,))}
    tensors, total = plan_layout(shapes)
    assert [(meta.offset, meta.nbytes) for meta in tensors] == [(0, 12), (64, 1), (128, 0), (128, 16)]
    assert total == 144


def test_no_tensors_take_no_bytes() -> None:
    assert plan_layout({}) == ((), 0)


def test_views_share_the_buffer_and_aliases_share_the_view() -> None:
    buffer = torch.zeros(128, dtype=torch.uint8)
    views = views_of(buffer, manifest())
    views["a"].fill_(2.5)
    assert buffer[:12].view(torch.float32).tolist() == [2.5, 2.5, 2.5]
    assert views["d"].data_ptr() == views["a"].data_ptr() == buffer.data_ptr()
    assert (views["b"].shape, views["b"].dtype, views["c"].shape) == ((), torch.bool, (0, 3))


@pytest.mark.parametrize("skipped", [0, 64, 192])
def test_views_in_one_step_are_those_of_the_plain_way(skipped: int) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "a": ("float32", (3, 4, 5)),
        "b": ("bool", ()),
        "c": ("bfloat16", (0, 3)),
        "d": ("complex64", (2, 0, 2)),
        "e": ("int8", (7,)),
        "f": ("bfloat16", (1, 1, 6)),
    }
    tensors, total = plan_layout(shapes)
    room = torch.randint(0, 2, (skipped + total + 3,), dtype=torch.uint8)
    buffer = room[skipped:]  # a part of a larger storage
    for meta, (name, view) in zip(tensors, stored_views(buffer, tensors).items(), strict=True):
        plain = view_of(buffer, meta)
        assert (name, view.dtype, view.shape, view.stride()) == (meta.name, plain.dtype, plain.shape, plain.stride())
        assert view.data_ptr() == plain.data_ptr()
        assert view.is_contiguous()
        assert torch.equal(view, plain)


@pytest.mark.parametrize("name", ["bool", "uint16", "uint64", "float8_e4m3fn", "float8_e8m0fnu", "complex64"])
def test_any_type_is_laid_out(name: str) -> None:
    (meta,), total = plan_layout({"x": (name, (2, 2))})
    assert view_of(torch.zeros(total, dtype=torch.uint8), meta).dtype == dtype_of(name)


def test_a_good_manifest_passes() -> None:
    check_manifest(manifest(), 65 + 63)


A = TensorMeta("a", "float32", (3,), 0, 12)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"tensors": (A, A)}, CoverageError, "twice: 'a'"),
        ({"aliases": {"a": "a"}}, CoverageError, "twice: 'a'"),
        ({"aliases": {"d": "x"}}, CoverageError, "'d' -> 'x'"),
        ({"aliases": {"d": "d"}}, CoverageError, "'d' -> 'd'"),
        ({"aliases": {"d" * 5000: "a"}}, SyncError, "5000 characters"),
        ({"tensors": (replace(A, nbytes=16),)}, SyncError, "claims 16 bytes"),
        ({"tensors": (replace(A, shape=(1 << 40,), nbytes=1 << 42),)}, SyncError, "claims offset 0"),
        ({"tensors": (replace(A, shape=(-3,), nbytes=-12),)}, SyncError, "shape"),
        ({"tensors": (replace(A, shape=(-3, -1)),)}, SyncError, "shape"),
        ({"tensors": (replace(A, shape=(1,) * 40, nbytes=4),)}, SyncError, "shape"),
        ({"tensors": (replace(A, shape=(0, 1 << 64), nbytes=0),)}, SyncError, "shape"),
        ({"tensors": (replace(A, shape=(1 << 62, 1 << 62, 0), nbytes=0),)}, SyncError, "shape"),
        ({"aliases": {"": "a"}}, SyncError, "name of 0"),
        ({"version": 1 << 63}, SyncError, "version 9223372036854775808"),
        ({"tensors": (replace(A, offset=-64),)}, SyncError, "offset -64"),
        ({"tensors": (replace(A, offset=4),)}, SyncError, "offset 4"),
        ({"tensors": (replace(A, offset=64),)}, SyncError, "offset 64"),
        ({"tensors": (A, TensorMeta("b", "float32", (3,), 0, 12))}, SyncError, "'a' and 'b' overlap"),
        ({"tensors": (replace(A, dtype="half", nbytes=6),)}, SyncError, "'half'"),
        ({"tensors": (replace(A, dtype="nn"),)}, SyncError, "'nn'"),
        ({"tensors": (replace(A, dtype="qint8", nbytes=3),)}, SyncError, "'qint8'"),
        ({"tensors": (replace(A, name=""),)}, SyncError, "name of 0"),
        ({"tensors": (replace(A, name="n" * 5000),)}, SyncError, "name of 5000"),
        ({"total_bytes": 1 << 50}, SyncError, "claims"),
        ({"total_bytes": -1}, SyncError, "claims"),
        ({"version": -1}, SyncError, "version -1"),
        ({"digest": "zz"}, SyncError, "digest"),
        ({"tensors": (replace(A, digest="zz"),)}, SyncError, "'a' has no valid digest"),
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, object], error: type[SyncError], reason: str) -> None:
    base = WeightManifest(1, (A,), {}, 64, "0" * 32, "arena", "address")
    lie = replace(base, **change)
    check_manifest(base, 64)
    with pytest.raises(error, match=reason):
        check_manifest(lie, 64)
    check = ManifestCheck()
    for _ in range(2):  # what was checked before is no excuse, nor is what was refused before
        check(base, 64)
        with pytest.raises(error, match=reason):
            check(lie, 64)
        with pytest.raises(error, match=reason):
            check(lie, 64)


def test_a_manifest_that_was_checked_is_checked_against_every_arena() -> None:
    check = ManifestCheck()
    check(manifest(), 65 + 63)
    with pytest.raises(SyncError, match="claims 128 bytes of an arena of 127"):
        check(manifest(), 127)


def test_every_type_of_torch_has_one_name() -> None:
    types = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    movable = {dtype for dtype in types if not dtype_name(dtype).startswith(("qint", "quint"))}
    assert all(dtype_of(dtype_name(dtype)) == dtype for dtype in movable)
    assert len(movable) > 15


def test_only_real_floats_of_two_bytes_and_more_are_cast() -> None:
    assert is_castable(torch.float64)
    assert is_castable(torch.float16)
    assert not any(is_castable(t) for t in (torch.float8_e5m2, torch.int64, torch.bool, torch.complex64))
