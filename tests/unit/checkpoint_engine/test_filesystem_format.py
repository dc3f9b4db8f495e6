"""What lies in a version's directory: shards that safetensors itself loads, and one spelling of everything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.checkpoint_engine.filesystem_format import Marker, plan_shards, shard_of
from paceline.checkpoint_engine.filesystem_storage import FORMAT, Stamp, decode_exact, parse_version
from paceline.core.errors import CoverageError, SyncError
from paceline.core.manifest import TensorMeta
from paceline.core.version import Version
from paceline.testing.publication import publish
from paceline.weights.digest import dense_bytes, digest_tensors
from paceline.weights.layout import plan_layout
from tests.unit.checkpoint_engine.roots import V1, names_below, receiver, sender, weights

CARRIED = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
CARRIED += ["int64", "int32", "int16", "int8", "uint8", "bool"]
RAW = ["uint16", "uint32", "uint64", "complex64", "complex128", "float8_e8m0fnu", "float8_e4m3fnuz"]


def of_type(name: str, count: int = 16) -> torch.Tensor:
    return (torch.arange(count * 16) % 2).to(torch.uint8).view(getattr(torch, name))[:count]


def test_safetensors_loads_what_it_can_name_and_the_bytes_of_the_rest(tmp_path: Path) -> None:
    named = [(name, of_type(name, 3)) for name in CARRIED + RAW] + [
        ("scalar", torch.tensor(2.5)),
        ("none", torch.ones(0, 2)),
    ]
    publish(sender(f"{tmp_path}/weights"), named, V1)
    loaded = load_file(tmp_path / "weights/1.1/weights-00001-of-00001.safetensors")
    assert set(loaded) == {name for name, _ in named}
    for name, tensor in named:
        raw = name in RAW
        assert loaded[name].dtype == (torch.uint8 if raw else tensor.dtype)
        assert loaded[name].shape == ((tensor.nbytes,) if raw else tensor.shape)
        assert dense_bytes(loaded[name]).tobytes() == dense_bytes(tensor).tobytes()


def test_every_type_comes_back_with_its_type(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    named = [(name, of_type(name)) for name in CARRIED + RAW]
    staged = receiver(url).stage(publish(sender(url), named, V1))
    assert all(staged.tensors[name].dtype == tensor.dtype for name, tensor in named)
    assert digest_tensors(dict(named), {}) == staged.digest


def test_a_version_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    staged = receiver(url).stage(publish(sender(url), weights(), V1))
    assert staged.tensors["head"].data_ptr() == staged.tensors["embed"].data_ptr()
    assert "head" not in load_file(tmp_path / "weights/1.1/weights-00001-of-00001.safetensors")
    assert names_below(url) == [
        "1.1/COMPLETE",
        "1.1/manifest.json",
        "1.1/weights-00001-of-00001.safetensors",
        "paceline-weights.json",
    ]


# ---- C03: tensors larger than a shard -------------------------------------------------------------------------------

C03 = {"p0": 10, "big": 1000, "p2": 256, "p3": 257}


@pytest.mark.parametrize("order", [("big", "p0", "p2", "p3"), ("p0", "big", "p2", "p3"), ("p0", "p2", "p3", "big")])
@pytest.mark.parametrize("shard_bytes", [1, 1024, 2048, 1 << 20])
def test_c03_any_order_and_shard_size_give_one_digest(tmp_path: Path, order: tuple[str, ...], shard_bytes: int) -> None:
    url = f"{tmp_path}/weights"
    named = [(name, torch.arange(float(C03[name]))) for name in order] + [("p4", torch.ones(1, dtype=torch.int8))]
    made = sender(url, shard_bytes=shard_bytes)
    staged = receiver(url, threads=2).stage(publish(made, named, V1))
    assert staged.digest == digest_tensors(dict(named), {})


def test_shards_hold_at_most_their_bytes_or_one_tensor() -> None:
    metas, _ = plan_layout({"a": ("int8", (4,)), "b": ("int8", (5,)), "c": ("int8", (1,)), "d": ("int8", (2,))})
    assert [[meta.name for meta in shard] for shard in plan_shards(metas, 4)] == [["a"], ["b"], ["c", "d"]]
    many = tuple(TensorMeta(f"t{index}", "int8", (0,), 0, 0) for index in range(5000))
    assert [len(shard) for shard in plan_shards(many, 4)] == [2000, 2000, 1000]


def test_tensors_start_at_multiples_of_their_item_size() -> None:
    metas, _ = plan_layout({"flag": ("bool", (3,)), "wide": ("float64", (2,)), "half": ("float16", (1,))})
    shard = shard_of(metas)
    assert len(shard.header) % 64 == 0
    assert [(meta.name, place - len(shard.header)) for meta, place in shard.places] == [
        ("wide", 0),
        ("half", 16),
        ("flag", 18),
    ]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 << 20), min_size=1, max_size=4),
    shard=st.integers(1, 6 << 20),
    threads=st.integers(1, 2),
)
def test_tensors_of_many_leaves_arrive_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard: int, threads: int
) -> None:
    url = f"{tmp_path_factory.mktemp('root')}/weights"
    named = [(f"t{index}", torch.arange(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    staged = receiver(url, threads=threads).stage(publish(sender(url, shard_bytes=shard), named, V1))
    assert staged.digest == digest_tensors(dict(named), {})


def test_a_tensor_above_a_read_run_arrives_whole(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    named = [("small", torch.ones(5)), ("large", torch.arange(9 << 20, dtype=torch.int32)), ("last", torch.ones(2))]
    staged = receiver(url, threads=2).stage(publish(sender(url), named, V1))
    assert staged.digest == digest_tensors(dict(named), {})


# ---- names and spelling ---------------------------------------------------------------------------------------------


def test_the_reserved_name_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    with pytest.raises(SyncError, match="__metadata__"):
        publish(sender(url), [("w", torch.ones(1)), ("__metadata__", torch.ones(1))], V1)
    assert names_below(url) == ["paceline-weights.json"]


@pytest.mark.parametrize("name", ["1.1", "0.0", "8388607.1099511627775"])
def test_version_names_are_read_back(name: str) -> None:
    assert str(parse_version(name)) == name
    assert parse_version("1.7") == Version(1, 7)


@pytest.mark.parametrize(
    "name", ["01.1", "1.01", "-1.1", "1", "1.1.1", "1.1 ", "..", "8388608.0", "1.1099511627776", "\u0661.\u0661"]
)
def test_other_names_are_no_versions(name: str) -> None:
    assert parse_version(name) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"format":"paceline-weights-1","x":' + b"[" * 200_000,
        b'{"format":"paceline-weights-2"}',
        b'{"format":"paceline-weights-1","format":"paceline-weights-1"}',
        b'{"format": "paceline-weights-1"}',
        b'{"format":"paceline-weights-1"}\n',
        b'{"format":"paceline-weights-1","x":1}',
        b'{"format":"\\u0070aceline-weights-1"}',
        b'{"format":"paceline\xff"}',
    ],
)
def test_json_has_one_spelling(data: bytes) -> None:
    with pytest.raises(SyncError, match="stamp"):
        decode_exact(data, Stamp, "stamp")


def test_the_written_spelling_is_accepted() -> None:
    assert decode_exact(msgspec.json.encode(Stamp(FORMAT)), Stamp, "stamp") == Stamp(FORMAT)
    marker = Marker(FORMAT, 7, "00")
    assert decode_exact(msgspec.json.encode(marker), Marker, "marker") == marker


def test_no_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="no parameters"):
        publish(sender(f"{tmp_path}/weights"), [], V1)
