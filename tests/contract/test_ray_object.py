"""The engine between nodes: what crosses, what is held for how long, and what a failing object store does to a sync."""

from __future__ import annotations

import gc
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.ray_object import RayObjectReceiver, RayObjectSender
from paceline.core.errors import CapacityError, DeadlineExceeded, DigestMismatch, SyncError, WorkerDied
from paceline.core.weight_ports import StagedWeights
from paceline.store.node_digests import NodeDigests
from paceline.testing.object_transport import InProcessObjects, ObjectCluster
from paceline.testing.publication import publish


def sender(cluster: ObjectCluster, arenas: int = 2) -> RayObjectSender:
    objects = InProcessObjects(cluster, "first")
    return RayObjectSender(objects, arenas=arenas, dtype=None, nonfinite="error", threads=1)


def receiver(cluster: ObjectCluster, holder: str = "replica-0", node: str = "second") -> RayObjectReceiver:
    objects = InProcessObjects(cluster, node)
    return RayObjectReceiver(objects, holder=holder, verify="full", deadline_seconds=60)


def stored_bytes(cluster: ObjectCluster) -> int:
    cluster.sweep()
    return sum(stored.data.nbytes for stored in cluster.objects.values())


def addresses(staged: StagedWeights) -> int:
    return staged.tensors["w"].data_ptr()


def test_bytes_cross_to_a_node_once_and_are_not_copied_there() -> None:
    cluster = ObjectCluster()
    manifest = publish(sender(cluster), [("w", torch.ones(1000))], 1)
    staged = [receiver(cluster, f"replica-{index}").stage(manifest) for index in range(4)]
    assert cluster.crossed == {"second": 4000}
    assert len({addresses(one) for one in staged}) == 1
    local = receiver(cluster, "replica-4", node="first").stage(manifest)
    receiver(cluster, "replica-5", node="third").stage(manifest)
    assert cluster.crossed == {"second": 4000, "third": 4000}
    assert {one.digest for one in [*staged, local]} == {manifest.digest}


def test_one_receiver_of_a_node_hashes_for_all_of_it(tmp_path: Path) -> None:
    cluster = ObjectCluster()
    digests = NodeDigests(str(tmp_path))

    def at(holder: str, node: str) -> RayObjectReceiver:
        objects = InProcessObjects(cluster, node)
        return RayObjectReceiver(objects, holder=holder, verify="full", deadline_seconds=60, digests=digests)

    writer = sender(cluster)
    readers = [at(f"replica-{index}", node) for index, node in enumerate(("second", "second", "third", "second"))]
    for version in (1, 2):
        manifest = publish(writer, [("w", torch.full((1000,), float(version)))], version)
        staged = [reader.stage(manifest) for reader in readers]
        assert {one.digest for one in staged} == {manifest.digest}
        assert [one.digest_by for one in staged] == ["replica-0", "replica-0", "replica-2", "replica-0"]
        for one in staged:
            one.release()


def test_a_damaged_copy_is_refused_by_all_of_its_node_and_by_no_other(tmp_path: Path) -> None:
    cluster = ObjectCluster()
    digests = NodeDigests(str(tmp_path))
    manifest = publish(sender(cluster), [("w", torch.ones(1000))], 1)
    receiver(cluster, "replica-9", node="second").stage(manifest).release()
    next(iter(cluster.objects.values())).copies["second"][5] ^= 1
    for holder, node in (("replica-0", "second"), ("replica-1", "second"), ("replica-2", "third")):
        objects = InProcessObjects(cluster, node)
        reader = RayObjectReceiver(objects, holder=holder, verify="full", deadline_seconds=60, digests=digests)
        if node == "third":
            assert reader.stage(manifest).digest == manifest.digest
            continue
        with pytest.raises(DigestMismatch, match=f"{holder} staged"):
            reader.stage(manifest)


def test_another_manifest_is_held_against_the_bytes(tmp_path: Path) -> None:
    cluster = ObjectCluster()
    manifest = publish(sender(cluster), [("q", torch.ones(16)), ("k", torch.zeros(16))], 1)
    one, other = manifest.tensors
    swapped = (replace(one, offset=other.offset), replace(other, offset=one.offset))
    readers = [
        RayObjectReceiver(
            InProcessObjects(cluster, "second"),
            holder=f"replica-{index}",
            verify="full",
            deadline_seconds=60,
            digests=NodeDigests(str(tmp_path)),
        )
        for index in range(2)
    ]
    readers[0].stage(manifest)
    with pytest.raises(DigestMismatch, match=r"replica-1 staged [0-9a-f]+$"):
        readers[1].stage(replace(manifest, tensors=swapped))
    assert readers[1].stage(manifest).digest_by == "replica-0"


# C03: there is no bucket; a tensor of any size lies whole in the one object.
@pytest.mark.parametrize("order", [("big", "p0", "p2"), ("p0", "big", "p2"), ("p0", "p2", "big")])
def test_c03_any_order_of_any_sizes_arrives(order: tuple[str, ...]) -> None:
    sizes = {"p0": 10, "big": 1000, "p2": 256, "p3": 257}
    cluster = ObjectCluster()
    named = [(name, torch.arange(float(sizes[name]))) for name in [*order, "p3"]]
    named.append(("p4", torch.ones(1, dtype=torch.int8)))
    staged = receiver(cluster).stage(publish(sender(cluster), named, 1))
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in named)
    assert sum(meta.nbytes for meta in staged.manifest.tensors) == 6093
    orders = [[*other, "p3", "p4"] for other in permutations(("big", "p0", "p2"))]
    digests = {publish(sender(ObjectCluster()), [(n, dict(named)[n]) for n in names], 1).digest for names in orders}
    assert digests == {staged.digest}


FAILURES = {
    "lost": SyncError("replica-0 cannot get weights from trainer on node first: ObjectLostError"),
    "owner died": WorkerDied("trainer on node first died before replica-0 had its weights", "trainer"),
    "silent": DeadlineExceeded("replica-0 waited 10 s for weights from trainer", "trainer on node first", 10.0),
    "boom": ValueError("boom in bucket 2"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_c08_a_failure_reaches_the_caller_and_the_next_stage_succeeds(kind: str) -> None:
    cluster, failure = ObjectCluster(), FAILURES[kind]
    writer, reader = sender(cluster), receiver(cluster)
    before = reader.stage(publish(writer, [("w", torch.ones(3))], 1))
    manifest = publish(writer, [("w", torch.full((3,), 2.0))], 2)
    cluster.fail_next = failure
    with pytest.raises(type(failure)) as caught:
        reader.stage(manifest)
    assert caught.value is failure
    assert before.tensors["w"].tolist() == [1.0] * 3
    after = reader.stage(manifest)
    assert after.tensors["w"].tolist() == [2.0] * 3
    before.release()
    assert list(writer.blocking_holders()) == []


def test_a_refused_version_is_not_held_while_its_error_is() -> None:
    cluster = ObjectCluster()
    writer, reader = sender(cluster), receiver(cluster)
    manifest = publish(writer, [("w", torch.ones(1000))], 1)
    next(iter(cluster.objects.values())).data[5] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        reader.stage(manifest)
    publish(writer, [("w", torch.ones(1000))], 2)
    assert stored_bytes(cluster) == 4000
    assert "published" in caught.value.message


def test_a_short_object_is_refused() -> None:
    cluster = ObjectCluster()
    manifest = publish(sender(cluster), [("w", torch.ones(1000))], 1)
    stored = next(iter(cluster.objects.values()))
    stored.data = stored.data[:-1]
    with pytest.raises(SyncError, match="claims 4000 bytes, the object has 3999"):
        receiver(cluster).stage(manifest)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_two_hundred_syncs_with_a_pin_keep_the_law_of_memory() -> None:
    size, arenas = 4096, 3
    cluster = ObjectCluster(capacity_bytes=arenas * size)
    writer, reader = sender(cluster, arenas), receiver(cluster)
    pinned: StagedWeights | None = None
    serving: StagedWeights | None = None
    most = 0
    for version in range(1, 201):
        staged = reader.stage(publish(writer, [("w", torch.full((size // 4,), float(version)))], version))
        most = max(most, stored_bytes(cluster))
        if serving is not None and serving is not pinned:
            serving.release()
        serving = staged
        if version % 10 == 1:
            if pinned is not None:
                pinned.release()
            pinned = staged
        assert pinned is not None
        assert (pinned.tensors["w"] == version - (version - 1) % 10).all()
    assert most == arenas * size
    reader.close()
    assert stored_bytes(cluster) == size  # the newest, for replicas that come later
    writer.close()
    assert stored_bytes(cluster) == 0


def test_memory_is_not_free_while_a_tensor_over_it_lives() -> None:
    cluster = ObjectCluster()
    writer, reader = sender(cluster), receiver(cluster)
    staged = reader.stage(publish(writer, [("w", torch.arange(1000.0))], 1))
    row = staged.tensors["w"].view(10, 100)[3]
    staged.release()
    publish(writer, [("w", torch.zeros(1000))], 2)
    assert len(writer.blocking_holders()) == 1
    assert row.tolist() == [float(number) for number in range(300, 400)]
    del row
    gc.collect()
    assert list(writer.blocking_holders()) == []


def test_bytes_of_the_store_are_handed_out_read_only() -> None:
    cluster = ObjectCluster()
    objects = InProcessObjects(cluster, "first")
    reference = objects.put(np.zeros(8, dtype=np.uint8).data)
    assert objects.get(reference, holder="replica-0", deadline_seconds=60).readonly


def test_a_store_that_is_too_small_is_refused_with_what_is_needed_and_free() -> None:
    cluster = ObjectCluster(capacity_bytes=7999)
    writer = sender(cluster)
    with pytest.raises(CapacityError, match=r"need 8000 bytes.*first has 7999 free"):
        publish(writer, [("w", torch.ones(1000))], 1)
    assert cluster.objects == {}


def test_a_full_store_leaves_the_version_before_as_it_was() -> None:
    cluster = ObjectCluster(capacity_bytes=8000)
    writer, reader = sender(cluster), receiver(cluster)
    first = publish(writer, [("w", torch.ones(1000))], 1)
    other = InProcessObjects(cluster, "first").put(np.zeros(1, dtype=np.uint8).data)
    with pytest.raises(SyncError, match="full"):
        publish(writer, [("w", torch.zeros(1000))], 2)
    assert reader.stage(first).tensors["w"].sum() == 1000
    InProcessObjects(cluster, "first").release(other)
    reader.stage(publish(writer, [("w", torch.zeros(1000))], 2))
