"""An outside process checks what a replica serves: it agrees, and sees one flipped byte."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import ServingBoard
from paceline.store.serving_table import FileServingBoard, hash_served, read_served
from paceline.weights.digest import digest_tensors

OUTSIDE = """
import sys
from paceline.store.serving_table import hash_served
print(*hash_served(sys.argv[1]), "torch" in sys.modules)
"""
# A replica in a process of its own: serves seeded weights, and flips one byte when told to.
REPLICA = """
import sys, torch
from tests.unit.store.test_serving_table import Serving, publish, weights
engine = Serving(weights(2_000_000))
publish(sys.argv[1], engine, 7)
print("serving", flush=True)
for line in sys.stdin:
    engine.tensors["big"].view(torch.uint8)[int(line)] ^= 1
    print("flipped", flush=True)
"""
ALIASES = {"head": "embed"}


def weights(size: int) -> dict[str, torch.Tensor]:
    embed = torch.arange(12.0).view(4, 3)
    return {
        "embed": embed,
        "head": embed,
        "big": torch.rand(size, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
    }


class Serving:
    """Weights that are served."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


def publish(directory: str, engine: Serving, version: int, aliases: dict[str, str] = ALIASES) -> str:
    digest = digest_tensors(engine.tensors, aliases)
    manifest = WeightManifest(version, (), aliases, 0, digest, "arena", "address")
    board: ServingBoard = FileServingBoard(directory, "replica-0")
    board.publish(version, digest, manifest, engine.tensors)
    return digest


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", REPLICA, str(tmp_path)],
        stdin=pipe,
        stdout=pipe,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_another_process_agrees_and_sees_a_flipped_byte(replica: subprocess.Popen[str], tmp_path: Path) -> None:
    path = str(tmp_path / "replica-0.json")
    expected = digest_tensors(weights(2_000_000), ALIASES)
    assert read_served(path).digest == expected
    assert hash_served(path) == (7, expected)
    assert replica.stdin is not None
    assert replica.stdout is not None
    replica.stdin.write("2999999\n")
    replica.stdin.flush()
    assert replica.stdout.readline() == "flipped\n"
    version, digest = hash_served(path)
    assert (version, digest != expected) == (7, True)
    flipped = weights(2_000_000)
    flipped["big"].view(torch.uint8)[2_999_999] ^= 1
    assert digest == digest_tensors(flipped, ALIASES)
    replica.kill()
    replica.wait(timeout=30)
    with pytest.raises(SyncError, match=rf"replica-0 \(pid {replica.pid}\) is gone"):
        hash_served(path)


def test_hashing_from_outside_needs_no_torch(tmp_path: Path) -> None:
    engine = Serving(weights(10))
    digest = publish(str(tmp_path), engine, 3)
    program = [sys.executable, "-c", OUTSIDE, str(tmp_path / "replica-0.json")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["3", digest, "False"]


def test_a_new_version_replaces_the_table_as_a_whole(tmp_path: Path) -> None:
    one, two = Serving(weights(10)), Serving(weights(20))
    publish(str(tmp_path), one, 1)
    digest = publish(str(tmp_path), two, 2)
    assert hash_served(str(tmp_path / "replica-0.json")) == (2, digest)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["replica-0.json", "replica-0.json.part"]
    assert read_served(str(tmp_path / "replica-0.json.part")).version == 1, "the table before, to be written over"


def test_a_table_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    engines = [Serving(weights(300_000)), Serving(weights(400_000))]
    path = str(tmp_path / "replica-0.json")
    digests = [publish(str(tmp_path), engines[version % 2], version) for version in (2, 3)]
    stop = threading.Event()

    def swap() -> None:
        version = 4
        while not stop.wait(0.002):
            publish(str(tmp_path), engines[version % 2], version)
            version += 1

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen = [_hash_or_nothing(path) for _ in range(10)]
    finally:
        stop.set()
        swapper.join()
    assert all(digest == digests[version % 2] for version, digest in filter(None, seen))
    version, digest = hash_served(path)
    assert digest == digests[version % 2]


def test_while_the_memory_changes_nothing_is_said_and_the_asker_waits(tmp_path: Path) -> None:
    board, path = FileServingBoard(str(tmp_path), "replica-0"), str(tmp_path / "replica-0.json")
    board.withdraw()
    assert list(tmp_path.iterdir()) == []
    engine = Serving(weights(10))
    old = digest_tensors(engine.tensors, ALIASES)
    board.publish(1, old, WeightManifest(1, (), ALIASES, 0, old, "arena", "address"), engine.tensors)
    assert hash_served(path) == (1, old)
    board.withdraw()
    engine.tensors["big"].view(torch.uint8)[3] ^= 1  # all of the new version is there, and it is not announced yet
    with pytest.raises(DeadlineExceeded, match=r"replica-0 change or cannot be proved, for 0\.15 s"):
        hash_served(path, deadline_seconds=0.15)
    new = digest_tensors(engine.tensors, ALIASES)
    later = threading.Timer(
        0.1,
        lambda: board.publish(2, new, WeightManifest(2, (), ALIASES, 0, new, "arena", "address"), engine.tensors),
    )
    later.start()
    assert hash_served(path) == (2, new)
    later.join()


def _hash_or_nothing(path: str) -> tuple[int, str] | None:
    """None when the table changed at every try."""
    try:
        return hash_served(path, deadline_seconds=0.1)
    except DeadlineExceeded:
        return None


def test_an_engine_that_holds_tied_names_apart_agrees_until_they_drift(tmp_path: Path) -> None:
    path = str(tmp_path / "replica-0.json")
    untied = weights(10)
    untied["head"] = untied["embed"].clone()
    engine = Serving(untied)
    expected = publish(str(tmp_path), engine, 1)
    assert hash_served(path) == (1, expected)
    untied["head"][3, 2] += 1
    assert hash_served(path)[1] != expected


def test_a_missing_tensor_changes_the_digest(tmp_path: Path) -> None:
    engine = Serving(weights(10))
    publish(str(tmp_path), engine, 1)
    path = tmp_path / "replica-0.json"
    table = read_served(str(path))
    path.write_bytes(msgspec.json.encode(replace(table, tensors=table.tensors[1:])))
    assert hash_served(str(path))[1] != table.digest


def test_addresses_that_are_not_mapped_are_an_error(tmp_path: Path) -> None:
    publish(str(tmp_path), Serving(weights(10)), 1)
    path = tmp_path / "replica-0.json"
    table = read_served(str(path))
    lost = tuple(replace(tensor, address=4096) for tensor in table.tensors)
    path.write_bytes(msgspec.json.encode(replace(table, tensors=lost)))
    with pytest.raises(SyncError, match="cannot be read"):
        hash_served(str(path))


def test_a_pid_that_was_used_again_is_noticed(tmp_path: Path) -> None:
    publish(str(tmp_path), Serving(weights(10)), 1)
    path = tmp_path / "replica-0.json"
    table = read_served(str(path))
    assert table.pid == os.getpid()
    path.write_bytes(msgspec.json.encode(replace(table, started=table.started + 1)))
    with pytest.raises(SyncError, match="is gone"):
        hash_served(str(path))


def test_no_table_and_a_broken_table_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="no replica serves"):
        read_served(str(tmp_path / "replica-9.json"))
    publish(str(tmp_path), Serving(weights(10)), 1)
    good = (tmp_path / "replica-0.json").read_bytes()
    assert b'"nbytes":48' in good
    broken = tmp_path / "broken.json"
    for text in (
        b'{"replica": 3}',
        good.replace(b'"nbytes":48', b'"nbytes":-48'),
        good.replace(b'"nbytes":48', b'"nbytes":' + b"9" * 40),
        good.replace(b'"address":', b'"address":-'),
        good.replace(b'"replica"', b'"deep":' + b"[" * 100_000 + b"]" * 100_000 + b',"replica"', 1),
    ):
        broken.write_bytes(text)
        with pytest.raises(SyncError, match="no table"):
            hash_served(str(broken))


def test_a_table_that_claims_more_bytes_than_are_mapped_is_an_error(tmp_path: Path) -> None:
    publish(str(tmp_path), Serving(weights(10)), 1)
    path = tmp_path / "replica-0.json"
    path.write_bytes(path.read_bytes().replace(b'"nbytes":48', b'"nbytes":' + str(1 << 62).encode()))
    with pytest.raises(SyncError, match="cannot be read"):
        hash_served(str(path))


def test_a_tensor_that_is_not_dense_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="not dense: turned"):
        publish(str(tmp_path), Serving({"turned": torch.ones(2, 3).t()}), 1, {})
