"""Shared memory alone: hashed once per node, arenas of both kinds, the memory law over 200 syncs, C03, C04, C24."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.checkpoint_engine.verification import VerifyMode
from paceline.core.errors import CapacityError, DigestMismatch
from paceline.core.manifest import WeightManifest
from paceline.store import copy_progress
from paceline.store.arena_backing import ArenaKind
from paceline.testing.publication import publish
from paceline.weights.digest import digest_tensors
from tests.contract.test_checkpoint_engine_leases import settled_descriptors
from tests.e2e.train_process import not_mapped

KINDS: tuple[ArenaKind, ...] = ("memfd", "file")
Named = list[tuple[str, torch.Tensor]]


class Node:
    """One sender and any number of receivers, below a directory that must be empty at the end."""

    def __init__(self, directory: str, kind: ArenaKind) -> None:
        self.kind = kind
        self.sender = SharedMemorySender(
            directory=directory, arenas=2, dtype=None, nonfinite="error", threads=2, arena=kind
        )
        self._receivers: list[SharedMemoryReceiver] = []

    def receiver(self, holder: str, verify: VerifyMode = "full") -> SharedMemoryReceiver:
        made = SharedMemoryReceiver(holder=holder, verify=verify, deadline_seconds=60)
        self._receivers.append(made)
        return made

    def write(self, manifest: WeightManifest, byte: int, value: int) -> None:
        """Change a published byte as only a broken writer could."""
        store = self.sender._store  # noqa: SLF001
        assert store is not None
        arena = next(arena for arena in store._arenas if arena.arena_id == manifest.arena_id)  # noqa: SLF001
        assert arena.begin_write()
        arena.array[byte] = value
        arena.end_write(manifest.version)

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self.sender.close()


@pytest.fixture(params=KINDS)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(str(tmp_path), request.param)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def same(tensors: dict[str, torch.Tensor], named: Named) -> bool:
    return digest_tensors(tensors, {}) == digest_tensors(dict(named), {})


# ---- hashed once per node -------------------------------------------------------------------------------------------


def test_the_second_receiver_relies_on_the_first_and_the_next_version_is_hashed_anew(node: Node) -> None:
    first, second = node.receiver("replica-0"), node.receiver("replica-1")
    for version in (1, 2, 3):
        manifest = publish(node.sender, [("w", torch.full((9,), float(version)))], version)
        staged = [first.stage(manifest), second.stage(manifest)]
        assert [one.digest for one in staged] == [manifest.digest] * 2
        assert [one.digest_by for one in staged] == ["replica-0"] * 2
        for one in staged:
            one.release()
        del staged


def test_a_damaged_version_is_refused_by_all_with_the_name_of_who_found_it(node: Node) -> None:
    first, second = node.receiver("replica-0"), node.receiver("replica-1")
    manifest = publish(node.sender, [("w", torch.ones(9))], 1)
    node.write(manifest, 3, 0)
    with pytest.raises(DigestMismatch, match=r"replica-0 staged [0-9a-f]+$"):
        first.stage(manifest)
    with pytest.raises(DigestMismatch, match=r"replica-1 staged [0-9a-f]+ \(as taken by replica-0\)"):
        second.stage(manifest)
    assert list(node.sender.blocking_holders()) == []


def swapped(manifest: WeightManifest) -> WeightManifest:
    """As published, but that two tensors of one size have each other's place."""
    one, other = manifest.tensors
    return replace(manifest, tensors=(replace(one, offset=other.offset), replace(other, offset=one.offset)))


def test_another_manifest_is_held_against_the_bytes_and_not_against_others_digests(node: Node) -> None:
    first, second = node.receiver("replica-0"), node.receiver("replica-1")
    manifest = publish(node.sender, [("q", torch.ones(9)), ("k", torch.zeros(9))], 1)
    first.stage(manifest).release()
    renamed = replace(manifest, tensors=(replace(manifest.tensors[0], name="v"), manifest.tensors[1]))
    reshaped = replace(manifest, tensors=(replace(manifest.tensors[0], shape=(3, 3)), manifest.tensors[1]))
    tied = replace(manifest, aliases={"v": "k"})
    for forged in (swapped(manifest), renamed, reshaped, tied):
        with pytest.raises(DigestMismatch, match=r"replica-1 staged [0-9a-f]+$"):
            second.stage(forged)
    staged = second.stage(manifest)
    assert (staged.digest_by, staged.tensors["q"].sum().item()) == ("replica-0", 9.0)
    staged.release()


def test_receivers_that_stage_at_the_same_time_hash_once(node: Node) -> None:
    manifest = publish(node.sender, [("w", torch.rand(1 << 20))], 1)
    receivers = [node.receiver(f"replica-{index}") for index in range(4)]
    by: list[str] = []
    threads = [
        threading.Thread(target=lambda one=receiver: by.append(one.stage(manifest).digest_by)) for receiver in receivers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(by) == 4
    assert len(set(by)) == 1


# ---- verify = changed -----------------------------------------------------------------------------------------------


def test_changed_hashes_all_at_first_and_then_what_has_changed(node: Node) -> None:
    receiver = node.receiver("replica-0", verify="changed")
    same_w, moving = torch.ones(64), torch.zeros(64)
    first = publish(node.sender, [("same", same_w), ("moving", moving)], 1)
    node.write(first, 0, 7)
    with pytest.raises(DigestMismatch):
        receiver.stage(first)
    second = publish(node.sender, [("same", same_w), ("moving", moving + 1)], 2)
    receiver.stage(second).release()
    third = publish(node.sender, [("same", same_w), ("moving", moving + 2)], 3)
    node.write(third, 0, 7)  # of the tensor that has not changed: taken on trust
    staged = receiver.stage(third)
    assert staged.digest == third.digest
    staged.release()
    del staged
    fourth = publish(node.sender, [("same", same_w), ("moving", moving + 3)], 4)
    node.write(fourth, 64 * 4, 7)  # of the one that has
    with pytest.raises(DigestMismatch):
        receiver.stage(fourth)


def test_a_first_sync_is_verified_in_full_beside_receivers_that_hash_only_changes(node: Node) -> None:
    old = node.receiver("replica-0", verify="changed")
    named: Named = [("same", torch.ones(64)), ("moving", torch.zeros(64))]
    old.stage(publish(node.sender, named, 1)).release()
    second = publish(node.sender, [named[0], ("moving", torch.ones(64))], 2)
    node.write(second, 0, 7)
    assert old.stage(second).digest == second.digest
    with pytest.raises(DigestMismatch, match="replica-1"):
        node.receiver("replica-1", verify="changed").stage(second)


def test_changed_takes_nothing_on_trust_that_lies_elsewhere_now(node: Node) -> None:
    receiver = node.receiver("replica-0", verify="changed")
    named: Named = [("q", torch.ones(9)), ("k", torch.zeros(9))]
    for version in (1, 2):
        receiver.stage(publish(node.sender, named, version)).release()
    third = publish(node.sender, named, 3)
    with pytest.raises(DigestMismatch, match="replica-0 staged"):
        receiver.stage(swapped(third))
    receiver.stage(third).release()


# ---- the memory law -------------------------------------------------------------------------------------------------


def counted(kind: ArenaKind) -> tuple[int, int]:
    """Maps of arenas, resident pages of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    arenas = maps.count("memfd:paceline" if kind == "memfd" else "/arena-")
    return arenas, int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def test_two_hundred_syncs_take_two_arenas_and_no_more(node: Node) -> None:
    gc.collect()  # maps of tests before this one
    receivers = [node.receiver(f"replica-{index}") for index in range(2)]
    weight = torch.zeros(1 << 19)
    held = [receiver.stage(publish(node.sender, [("w", weight)], 1)) for receiver in receivers[:1]]
    arenas: set[str] = set()
    seen: list[tuple[int, int]] = []
    early = 0
    for version in range(2, 202):
        weight += 1
        manifest = publish(node.sender, [("w", weight)], version)
        staged = [receiver.stage(manifest) for receiver in receivers]
        for one in held:
            one.release()
        held = staged
        del staged
        arenas.add(manifest.arena_id)
        assert held[-1].tensors["w"][-1] == version - 1
        seen.append(counted(node.kind))
        if version == 12:
            early = settled_descriptors()
    assert len(arenas) == 2
    # Owner and two receivers have one map of each arena.
    assert {maps for maps, _ in seen[2:]} == {6}
    assert settled_descriptors() == early
    # One version per sync would be 400 MiB.
    assert (seen[-1][1] - seen[20][1]) * 4096 < 8 << 20
    for one in held:
        one.release()


def test_a_receiver_keeps_no_map_of_a_sender_of_an_earlier_life(tmp_path: Path) -> None:
    gc.collect()  # maps of tests before this one
    receiver = SharedMemoryReceiver(holder="replica-0", verify="full", deadline_seconds=60)
    for life in range(3):
        node = Node(str(tmp_path), "memfd")
        for n in (1, 2):
            staged = receiver.stage(publish(node.sender, [("w", torch.ones(9))], (life << 40) | n))
            staged.release()
            del staged
        node.close()
        assert counted("memfd")[0] == 2
    receiver.close()
    assert counted("memfd")[0] == 0


# ---- C03, C04: sizes and buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 4])
def test_c03_large_and_small_tensors_in_any_order(node: Node, place: int) -> None:
    """There is no bucket here: what may not fit is the arena as a whole, and that is asked first."""
    named: Named = [
        ("p0", torch.rand(10)),
        ("p2", torch.rand(256)),
        ("p3", torch.rand(257)),
        ("p4", torch.tensor([7], dtype=torch.int8)),
    ]
    named.insert(place, ("big", torch.rand(1000)))
    manifest = publish(node.sender, named, 1)
    assert sum(meta.nbytes for meta in manifest.tensors) == 6093
    staged = node.receiver("replica-0").stage(manifest)
    assert same(dict(staged.tensors), named)
    staged.release()


def test_c03_a_tensor_that_fits_nowhere_is_refused_before_anything_is_reserved(node: Node) -> None:
    huge = torch.zeros(1).expand(1 << 50)
    with pytest.raises(CapacityError, match=rf"2 weight arenas of {4 << 50} bytes need {8 << 50} bytes"):
        publish(node.sender, [("big", huge)], 1)


SLOW_READER = """
import sys, time, msgspec
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver
from paceline.core.manifest import WeightManifest
manifest = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WeightManifest)
staged = SharedMemoryReceiver(holder=sys.argv[1], verify="full", deadline_seconds=60).stage(manifest)
print("staged", flush=True)
time.sleep(0.5)
kept = {name: tensor.clone() for name, tensor in staged.tensors.items()}
print(*(sorted(set(kept[name].tolist())) for name in ("w0", "w1")), staged.digest, flush=True)
time.sleep(600)
"""


def test_c04_a_slow_reader_reads_its_version_to_the_end(node: Node) -> None:
    """Two readers on one arena, one slow; the writer wants the memory again and has to wait for the slow one."""
    fast = node.receiver("fast")
    manifest = publish(node.sender, [("w0", torch.full((4096,), 1.0)), ("w1", torch.full((4096,), 2.0))], 1)
    reader = subprocess.Popen(
        [sys.executable, "-c", SLOW_READER, "slow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(msgspec.msgpack.encode(manifest))
        reader.stdin.close()
        reader.stdin = None
        assert reader.stdout.readline() == b"staged\n"
        fast.stage(manifest).release()
        newest = fast.stage(publish(node.sender, [("w0", torch.zeros(4096)), ("w1", torch.zeros(4096))], 2))
        assert list(node.sender.blocking_holders()) == ["slow"]
        line = reader.stdout.readline().decode()
        assert line == f"[1.0] [2.0] {manifest.digest}\n"
        assert list(node.sender.blocking_holders()) == ["slow"]
        assert not newest.tensors["w0"].any()
    finally:
        reader.send_signal(signal.SIGKILL)
        reader.communicate(timeout=30)
    assert list(node.sender.blocking_holders()) == []


def test_c04_scribbling_over_a_released_arena_changes_no_version_that_is_held(node: Node) -> None:
    receiver = node.receiver("replica-0")
    first = publish(node.sender, [("w", torch.ones(4096))], 1)
    receiver.stage(first).release()
    second = publish(node.sender, [("w", torch.full((4096,), 2.0))], 2)
    held = receiver.stage(second)
    store = node.sender._store  # noqa: SLF001
    assert store is not None
    scribbled = next(arena for arena in store._arenas if arena.arena_id == first.arena_id)  # noqa: SLF001
    assert scribbled.begin_write()
    scribbled.array[:] = 0xFF
    scribbled.end_write(None)
    assert digest_tensors(held.tensors, {}) == second.digest
    held.release()


# ---- a store in another process -------------------------------------------------------------------------------------

DYING_VERIFIER = """
import os, sys, msgspec
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver
from paceline.checkpoint_engine.verification import Verification
from paceline.core.manifest import WeightManifest
manifest = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WeightManifest)
receiver = SharedMemoryReceiver(holder="dying", verify="full", deadline_seconds=60)
class Dying:
    mode, scope = "full", "full"
    def digest(self, manifest, tensors):
        os.kill(os.getpid(), 9)
receiver._verification = Dying()
receiver.stage(manifest)
"""


def test_a_receiver_that_is_killed_while_it_hashes_holds_nobody_up(node: Node) -> None:
    manifest = publish(node.sender, [("w", torch.rand(100_000))], 1)
    killed = subprocess.run(
        [sys.executable, "-c", DYING_VERIFIER], input=msgspec.msgpack.encode(manifest), check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    staged = node.receiver("replica-1").stage(manifest)
    assert (staged.digest, staged.digest_by) == (manifest.digest, "replica-1")
    staged.release()


def test_c24_eight_readers_start_at_once_over_twenty_rounds(node: Node) -> None:
    receivers = [node.receiver(f"replica-{index}") for index in range(8)]
    for version in range(1, 21):
        manifest = publish(node.sender, [("w", torch.full((64,), float(version)))], version)
        found: list[float] = []

        def read(receiver: SharedMemoryReceiver, published: WeightManifest, into: list[float]) -> None:
            staged = receiver.stage(published)
            into.append(float(staged.tensors["w"][0]))
            staged.release()

        threads = [threading.Thread(target=read, args=(one, manifest, found)) for one in receivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [float(version)] * 8


def test_nothing_appears_in_shared_memory_file_systems() -> None:
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory() as directory:
        node = Node(directory, "memfd")
        staged = node.receiver("replica-0").stage(publish(node.sender, [("w", torch.ones(9))], 1))
        assert "/dev/shm/" not in Path("/proc/self/maps").read_text(encoding="utf-8")
        assert not_mapped([str(path) for path in set(Path("/dev/shm").iterdir()) - before]) == []  # others may come
        assert np.array_equal(staged.tensors["w"].numpy(), np.ones(9))
        staged.release()
        del staged
        node.close()


def test_replicas_that_copy_hear_of_each_other_and_those_that_map_do_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_progress, "_FRESH_NANOSECONDS", 60_000_000_000)
    manifest = publish(node.sender, [("w", torch.ones(1000))], 1)
    staged = [node.receiver(name).stage(manifest, apply="copied") for name in ("a", "b")]
    mapped = node.receiver("c").stage(manifest)
    one, two = (weights.copies for weights in staged)
    assert one is not None
    assert two is not None
    assert two.place() is None
    one.tell(3)
    assert two.place() == 3
    assert mapped.copies is None
    for weights in (*staged, mapped):
        weights.release()
