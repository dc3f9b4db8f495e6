"""One suite for every checkpoint engine, versions: who holds what, what is reused, what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from paceline.core.errors import ConfigError, CoverageError, DigestMismatch, SyncError, VersionError
from paceline.core.weight_ports import StagedWeights
from paceline.testing.publication import publish
from tests.contract.checkpoint_engine_links import COPIED, LINKS, MAPPED, WRITTEN_ONCE, Link, SharedMemoryLink


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = LINKS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=MAPPED)
def mapped(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = MAPPED[request.param]()
    yield made
    made.close()


@pytest.fixture(params=COPIED)
def copied(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = COPIED[request.param]()
    yield made
    made.close()


# ---- arenas and leases ----------------------------------------------------------------------------------------------


def test_a_held_version_never_changes_and_its_holder_is_named(mapped: Link) -> None:
    sender = mapped.sender()
    slow, fast = mapped.receiver("replica-slow"), mapped.receiver("replica-fast")
    held = slow.stage(publish(sender, [("w", torch.full((1000,), 1.0))], 1))
    current = fast.stage(publish(sender, [("w", torch.full((1000,), 2.0))], 2))
    assert list(sender.blocking_holders()) == ["replica-slow"]
    with pytest.raises(SyncError, match="held by replica-slow"):
        publish(sender, [("w", torch.full((1000,), 3.0))], 3)
    assert (held.tensors["w"] == 1).all()
    held.release()
    assert list(sender.blocking_holders()) == []
    third = publish(sender, [("w", torch.full((1000,), 3.0))], 3)
    assert (current.tensors["w"] == 2).all()
    assert isinstance(mapped, WRITTEN_ONCE) or third.arena_id == held.manifest.arena_id


def test_a_version_that_is_gone_is_refused(link: Link) -> None:
    sender, receiver = link.sender(), link.receiver()
    old = publish(sender, [("w", torch.ones(1))], 1)
    publish(sender, [("w", torch.ones(1))], 2)
    newest = publish(sender, [("w", torch.ones(1))], 3)
    with pytest.raises(SyncError, match="version 1 is gone"):
        receiver.stage(old)
    with pytest.raises(SyncError, match="no arena"):
        receiver.stage(replace(newest, arena_id="elsewhere"))
    assert receiver.stage(newest).manifest.version == 3
    assert list(sender.blocking_holders()) == []


def test_a_late_receiver_gets_the_newest_version(link: Link) -> None:
    sender, early = link.sender(), link.receiver()
    manifest = publish(sender, [("w", torch.ones(3))], 1)
    first = early.stage(manifest)
    second = link.receiver("replica-late").stage(manifest)
    assert first.digest == second.digest
    first.release()
    assert second.tensors["w"].tolist() == [1.0] * 3


def test_release_and_close_can_come_in_any_order_and_twice(link: Link) -> None:
    sender, receiver = link.sender(), link.receiver()
    staged = receiver.stage(publish(sender, [("w", torch.ones(3))], 1))
    other = receiver.stage(staged.manifest)
    staged.release()
    staged.release()
    with pytest.raises(SyncError, match="was released"):
        _ = staged.tensors
    publish(sender, [("w", torch.ones(3))], 2)
    assert other.tensors["w"].tolist() == [1.0] * 3
    receiver.close()
    other.release()
    assert list(sender.blocking_holders()) == []
    receiver.close()


def test_a_staged_version_is_held_until_its_receiver_closes(mapped: Link) -> None:
    sender, receiver = mapped.sender(), mapped.receiver()
    staged = receiver.stage(publish(sender, [("w", torch.ones(3))], 1))
    newest = mapped.receiver("replica-1").stage(publish(sender, [("w", torch.ones(3))], 2))
    assert list(sender.blocking_holders()) == ["replica-0"]
    receiver.close()
    assert list(sender.blocking_holders()) == []
    staged.release()
    newest.release()


def test_a_copied_version_outlives_its_place(copied: Link) -> None:
    sender = copied.sender()
    slow, fast = copied.receiver("replica-slow"), copied.receiver("replica-fast")
    held = slow.stage(publish(sender, [("w", torch.full((1000,), 1.0))], 1))
    for version in (2, 3, 4):
        current = fast.stage(publish(sender, [("w", torch.full((1000,), float(version)))], version))
        assert (current.tensors["w"] == version).all()
        assert list(sender.blocking_holders()) == []
    with pytest.raises(SyncError, match="version 1 is gone"):
        fast.stage(held.manifest)
    assert (held.tensors["w"] == 1).all()


def settled_descriptors() -> int:
    """How many this process has open, once a store has closed its ends of leases that have ended: it does not wait."""
    gc.collect()  # those of tests before this one
    deadline = time.monotonic() + 60
    seen = [-1, len(os.listdir("/proc/self/fd"))]  # noqa: PTH208
    while len(set(seen[-20:])) > 1 or len(seen) < 20:
        assert time.monotonic() < deadline, "descriptors come and go although nothing is asked for"
        time.sleep(0.01)
        seen.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    return seen[-1]


def test_two_hundred_versions_grow_nothing(link: Link) -> None:
    """Each is served until the next one is staged, by two readers; before that its memory is used by others."""
    sender, receivers = link.sender(arenas=3), [link.receiver(f"replica-{index}") for index in range(2)]
    weight = torch.zeros(1 << 18)
    serving: list[StagedWeights] = []
    early = 0
    resident: list[int] = []
    for version in range(1, 201):
        weight += 1
        manifest = publish(sender, [("w", weight)], version)
        staged = [receiver.stage(manifest) for receiver in receivers]
        assert [one.tensors["w"][-1] for one in staged] == [version] * 2
        for one in serving:
            one.release()
        serving = staged
        if version == 20:
            early = settled_descriptors()
        resident.append(int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]))
    assert settled_descriptors() == early
    # One version per sync would be 180 MiB.
    assert (resident[-1] - resident[20]) * 4096 < 16 << 20
    for one in serving:
        one.release()


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_versions_only_rise(link: Link) -> None:
    sender = link.sender()
    publish(sender, [("w", torch.ones(1))], 4)
    for version in (4, 3):
        with pytest.raises(VersionError):
            publish(sender, [("w", torch.ones(1))], version)


def test_other_tensors_than_at_first_are_refused_with_all_names(link: Link) -> None:
    sender = link.sender()
    publish(sender, [("a", torch.ones(1)), ("b", torch.ones(2))], 1)
    with pytest.raises(CoverageError, match=r"'b' is missing; 'c' is new; 'a' was float32 \[1\] and is float32 \[2\]"):
        publish(sender, [("a", torch.ones(2)), ("c", torch.ones(2))], 2)


def test_a_manifest_that_lies_is_refused(link: Link) -> None:
    sender, receiver = link.sender(), link.receiver()
    manifest = publish(sender, [("w", torch.ones(4))], 1)
    meta = manifest.tensors[0]
    for lie in (
        replace(manifest, total_bytes=1 << 40),
        replace(manifest, tensors=(replace(meta, shape=(1 << 30,), nbytes=4 << 30),), total_bytes=4 << 30),
        replace(manifest, tensors=(replace(meta, dtype="nothing"),)),
        replace(manifest, aliases={"x": "y"}),
        replace(manifest, tensors=(meta, meta)),
    ):
        with pytest.raises(SyncError):
            receiver.stage(lie)
    with pytest.raises(DigestMismatch):
        receiver.stage(replace(manifest, tensors=(replace(meta, name="other"),)))
    publish(sender, [("w", torch.ones(4))], 2)
    publish(sender, [("w", torch.ones(4))], 3)


def test_one_version_is_a_configuration_error(link: Link) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        link.sender(arenas=1)


# ---- shared memory alone: another process ---------------------------------------------------------------------------

OTHER_PROCESS = """
import sys, msgspec
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver
from paceline.core.manifest import WeightManifest
manifest = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WeightManifest)
staged = SharedMemoryReceiver(holder="replica-1", verify="full", deadline_seconds=60).stage(manifest)
print(staged.digest, *staged.tensors["head"].tolist())
"""


def test_another_process_stages_the_same_bytes() -> None:
    link = SharedMemoryLink()
    weight = torch.tensor([1.5, -0.0, 2.0])
    manifest = publish(link.sender(), [("embed", weight), ("head", weight)], 1)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        input=msgspec.msgpack.encode(manifest),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == [manifest.digest.encode(), b"1.5", b"-0.0", b"2.0"]
    link.close()
