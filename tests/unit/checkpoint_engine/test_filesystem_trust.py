"""A damaged or forged version is refused with one error, before memory is reserved, and never served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.checkpoint_engine.filesystem_format import shard_of
from paceline.core.errors import CapacityError, PacelineError, SyncError
from paceline.core.manifest import WeightManifest
from paceline.runtime.system import InlineWork
from paceline.testing.publication import publish
from paceline.weights.tree_digest import root_digest
from tests.unit.checkpoint_engine.roots import V1, V2, HookedClock, receiver, rewrite, sender, sign, weights

FILES = ["COMPLETE", "manifest.json", "weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"]


def published(root: Path) -> WeightManifest:
    made = sender(str(root), shard_bytes=50)
    manifest = publish(made, weights(), V1)
    made.close()
    return manifest


def follow(root: Path) -> WeightManifest:
    """What a stranger who trusts only the files would stage."""
    found = FilesystemFollower(str(root), clock=HookedClock(), work=InlineWork()).latest()
    if found is None:
        raise SyncError("nothing there")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trust") / "weights"
    published(made)
    assert {path.name for path in (made / "1.1").iterdir()} == set(FILES)
    return made


# ---- damage ---------------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(name=st.sampled_from(FILES), place=st.integers(0, 1 << 30), bit=st.integers(0, 7), announced=st.booleans())
def test_a_flipped_bit_in_any_file_is_caught(root: Path, name: str, place: int, bit: int, announced: bool) -> None:
    manifest = follow(root)
    path = root / "1.1" / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[place % len(data)] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        with pytest.raises(SyncError):
            receiver(str(root)).stage(manifest if announced else follow(root))
    finally:
        path.write_bytes(data)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(FILES), data=st.data())
def test_truncation_growth_and_noise_are_caught(root: Path, name: str, data: st.DataObject) -> None:
    path = root / "1.1" / name
    good = path.read_bytes()
    cut = good[: data.draw(st.integers(0, len(good)))] + data.draw(st.binary(max_size=40))
    path.write_bytes(cut)
    try:
        staged = receiver(str(root)).stage(follow(root))
    except SyncError:
        assert cut != good
    else:
        assert cut == good
        assert staged.digest == staged.manifest.digest
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_version_that_is_gone(root: Path, name: str, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "weights")
    (tmp_path / "weights/1.1" / name).unlink()
    with pytest.raises(SyncError, match="is gone"):
        receiver(f"{tmp_path}/weights").stage(follow(root))


def test_after_a_refusal_the_next_version_is_staged(tmp_path: Path) -> None:
    made = sender(str(tmp_path))
    damaged = publish(made, weights(1), V1)
    (tmp_path / "1.1/weights-00001-of-00001.safetensors").write_bytes(b"")
    replica = receiver(str(tmp_path))
    with pytest.raises(SyncError, match="has 0 bytes, the manifest names"):
        replica.stage(damaged)
    assert replica.stage(publish(made, weights(2), V2)).tensors["norm"].tolist() == [2.0] * 7


# ---- forgery: marker and manifest agree, but lie ---------------------------------------------------------------------


def tensor(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["weights"]["tensors"][1].update(fields)


def weight(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["weights"].update(fields)


def shard(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["shards"][0].update(fields)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "size": tensor(nbytes=1 << 50),
    "shape": tensor(shape=[1 << 40], nbytes=4 << 40),
    "many dimensions": tensor(shape=[7] + [1] * 32),
    "negative shape": tensor(shape=[-7]),
    "offset": tensor(offset=1 << 40),
    "negative offset": tensor(offset=-64),
    "overlap": tensor(offset=0),
    "dtype": tensor(dtype="int32"),
    "unknown dtype": tensor(dtype="load"),
    "quantized dtype": tensor(dtype="qint8"),
    "other name": tensor(name="other"),
    "name twice": tensor(name="embed"),
    "no name": tensor(name=""),
    "long name": tensor(name="x" * 5000),
    "reserved name": tensor(name="__metadata__"),
    "tensor digest": tensor(digest="0" * 32),
    "no tensor digest": tensor(digest=""),
    "digest": weight(digest="0" * 32),
    "digest in capitals": lambda tree: tree["weights"].update(digest=tree["weights"]["digest"].upper()),
    "total": weight(total_bytes=1 << 60),
    "version": weight(version=V2),
    "negative version": weight(version=-1),
    "arena": weight(arena_id="../1.1"),
    "alias of nothing": weight(aliases={"head": "nothing"}),
    "alias left out": weight(aliases={}),
    "alias added": lambda tree: tree["weights"]["aliases"].update(other="embed"),
    "base": weight(base_version=V1),
    "delta of nothing": weight(delta={"base_version": V1}),
    "delta": lambda tree: tree.update(kind="delta"),
    "no tensors": weight(tensors=[]),
    "path in a shard's name": shard(name="../1.1/weights-00001-of-00002.safetensors"),
    "absolute shard": shard(name="/etc/passwd"),
    "shard's size": shard(nbytes=1 << 40),
    "shard's tensors": shard(tensors=2),
    "negative shard": shard(tensors=-1),
    "no shards": lambda tree: tree.update(shards=[]),
    "format": lambda tree: tree.update(format="paceline-weights-2"),
    "unknown field": lambda tree: tree.update(extra=1),
    "unknown field below": weight(extra=1),
    "float": tensor(nbytes=28.0),
    "huge number": tensor(nbytes=1 << 200),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_manifest_is_refused(root: Path, tmp_path: Path, lie: str) -> None:
    shutil.copytree(root, tmp_path / "weights")
    rewrite(tmp_path / "weights/1.1", LIES[lie])
    with pytest.raises(PacelineError) as caught:
        receiver(f"{tmp_path}/weights").stage(follow(tmp_path / "weights"))
    assert isinstance(caught.value, SyncError)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 6000


def test_a_rewritten_manifest_that_tells_the_truth_is_accepted(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "weights")
    rewrite(tmp_path / "weights/1.1", lambda tree: None)
    assert receiver(f"{tmp_path}/weights").stage(follow(tmp_path / "weights")).digest == follow(root).digest


@pytest.mark.parametrize("inner", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_deep_nesting_is_refused(root: Path, tmp_path: Path, inner: bytes) -> None:
    shutil.copytree(root, tmp_path / "weights")
    good = (root / "1.1/manifest.json").read_bytes()
    for forged in (inner, good.replace(b'"version":', b'"deep":' + inner + b',"version":', 1)):
        sign(tmp_path / "weights/1.1", forged)
        with pytest.raises(SyncError):
            follow(tmp_path / "weights")


def test_double_keys_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "weights")
    good = (root / "1.1/manifest.json").read_bytes()
    for key in (b'"kind":"full"', b'"head":"embed"', b'"name":"norm"'):
        assert key in good
        sign(tmp_path / "weights/1.1", good.replace(key, key + b"," + key, 1))
        with pytest.raises(SyncError, match="not spelled as it is written"):
            follow(tmp_path / "weights")


@pytest.mark.parametrize("length", [0, 7, 1 << 31, (1 << 64) - 1])
def test_a_lying_header_length_is_refused(root: Path, tmp_path: Path, length: int) -> None:
    shutil.copytree(root, tmp_path / "weights")
    path = tmp_path / "weights/1.1" / FILES[2]
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(SyncError, match="the header is not the one"):
        receiver(f"{tmp_path}/weights").stage(follow(root))


def test_a_header_that_says_something_else_is_refused_without_verification_too(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "weights")
    path = tmp_path / "weights/1.1" / FILES[2]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    with pytest.raises(SyncError, match="the header is not the one"):
        receiver(f"{tmp_path}/weights", verify="off").stage(follow(root))


def test_huge_files_are_refused_unread(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "weights")
    for name, size in (("manifest.json", 1 << 40), ("COMPLETE", 1 << 40)):
        os.truncate(tmp_path / "weights/1.1" / name, size)
        with pytest.raises(SyncError, match="at most"):
            follow(tmp_path / "weights")


def test_a_version_for_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    """All sizes and digests agree, even with the (sparse) file's: the memory is asked for before it is reserved."""
    made = sender(str(tmp_path))
    weights = publish(made, [("w", torch.zeros(0, dtype=torch.uint8))], V1)
    size = 1 << 43
    large = replace(weights.tensors[0], shape=(size,), nbytes=size)
    shard = shard_of([large])

    def grow(tree: dict[str, Any]) -> None:
        entries = {"w": ("uint8", (size,), bytes.fromhex(large.digest))}
        tree["weights"].update(tensors=[large], total_bytes=size, digest=root_digest(entries, {}))
        tree["shards"][0]["nbytes"] = shard.nbytes

    rewrite(tmp_path / "1.1", grow)
    path = tmp_path / "1.1/weights-00001-of-00001.safetensors"
    path.write_bytes(shard.header)
    os.truncate(path, shard.nbytes)
    with pytest.raises(CapacityError, match=f"{size} bytes .* are free"):
        receiver(str(tmp_path)).stage(follow(tmp_path))


# ---- what is no plain file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_only_plain_files_are_read(root: Path, tmp_path: Path, name: str, kind: str) -> None:
    copy = tmp_path / "weights"
    shutil.copytree(root, copy)
    path = copy / "1.1" / name
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(SyncError):
        receiver(str(copy)).stage(follow(root))


def test_a_linked_version_directory_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/1.1").symlink_to(root / "1.1")
    with pytest.raises(SyncError, match="nothing there"):
        follow(tmp_path / "weights")
    with pytest.raises(SyncError, match="cannot be read"):
        receiver(f"{tmp_path}/weights").stage(follow(root))


@pytest.mark.parametrize("arena_id", ["../1.1", "/etc", "1.1/../1.1", "1.01", ""])
def test_an_announced_place_is_compared_not_followed(root: Path, arena_id: str) -> None:
    with pytest.raises(SyncError, match="no arena"):
        receiver(str(root)).stage(replace(follow(root), arena_id=arena_id))


def test_an_announced_address_is_not_opened(root: Path) -> None:
    staged = receiver(str(root)).stage(replace(follow(root), address="http://localhost:1/elsewhere"))
    assert staged.digest == follow(root).digest
