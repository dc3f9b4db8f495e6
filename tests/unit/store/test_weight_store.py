"""The store's law: versions rise, the newest and the leased are never written, names are those of the holders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import SyncError, VersionError
from paceline.store.arena_reader import ArenaReader
from paceline.store.mapped_arena import ArenaLease
from paceline.store.weight_store import WeightStore

SIZE = 1 << 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    made = WeightStore(directory=str(tmp_path), arenas=2, capacity=SIZE)
    yield made
    made.close()


def publish(store: WeightStore, version: int) -> str:
    with store.writing(version) as arena:
        arena.array[:] = version % 251
    return arena.arena_id


def lease(store: WeightStore, arena_id: str, version: int, holder: str = "replica-0") -> ArenaLease:
    made, _ = ArenaReader().lease(
        address=store.address,
        arena_id=arena_id,
        version=version,
        total_bytes=SIZE,
        holder=holder,
        deadline_seconds=60,
    )
    return made


def test_two_arenas_take_turns_and_the_newest_is_kept(store: WeightStore) -> None:
    ids = [publish(store, version) for version in range(1, 7)]
    assert ids[0::2] == [ids[0]] * 3
    assert ids[1::2] == [ids[1]] * 3
    assert ids[0] != ids[1]
    assert store.blocking_holders() == []
    with pytest.raises(SyncError, match="version 5 is gone: its arena holds version 6"):
        lease(store, ids[5], 5)


def test_versions_only_rise(store: WeightStore) -> None:
    publish(store, 5)
    for version in (5, 4):
        with pytest.raises(VersionError, match=f"version {version} cannot follow version 5"):
            publish(store, version)
    publish(store, 1 << 40)


def test_version_zero_is_a_version(store: WeightStore) -> None:
    arena_id = publish(store, 0)
    held = lease(store, arena_id, 0)
    assert int(held.array.max()) == 0
    held.release()
    assert publish(store, 1) != arena_id


def test_a_failed_capture_publishes_nothing_and_frees_its_arena(store: WeightStore) -> None:
    first = publish(store, 1)
    written = ""

    def fail() -> None:
        nonlocal written
        with store.writing(2) as arena:
            written = arena.arena_id
            arena.array[:] = 9
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    with pytest.raises(SyncError, match="version 2 is gone: its arena holds no version"):
        lease(store, written, 2)
    lease(store, first, 1).release()
    assert publish(store, 2) == written


def test_holders_of_what_blocks_are_named_and_no_others(store: WeightStore) -> None:
    old = publish(store, 1)
    slow = [lease(store, old, 1, "replica-1"), lease(store, old, 1, "validation")]
    new = publish(store, 2)
    current = lease(store, new, 2, "replica-0")
    assert store.blocking_holders() == ["replica-1", "validation"]
    with pytest.raises(SyncError, match="no free arena for version 3: held by replica-1, validation"):
        publish(store, 3)
    slow[0].release()
    slow[1].release()
    assert store.blocking_holders() == []
    assert publish(store, 3) == old
    current.release()


def test_a_version_that_nobody_took_blocks_nothing_but_is_given_up_last(store: WeightStore) -> None:
    old = publish(store, 1)
    serving = lease(store, old, 1)
    lost = publish(store, 2)
    assert store.blocking_holders() == []
    assert publish(store, 3) == lost
    with pytest.raises(SyncError, match="version 2 is gone"):
        lease(store, lost, 2)
    serving.release()
    assert publish(store, 4) == old


def test_a_failed_capture_over_the_newest_version_brings_no_version_back(store: WeightStore) -> None:
    serving = lease(store, publish(store, 1), 1)
    publish(store, 2)
    with pytest.raises(RuntimeError, match="broken"), store.writing(3):
        raise RuntimeError("broken")
    with pytest.raises(VersionError, match="version 2 cannot follow version 2"):
        publish(store, 2)
    publish(store, 3)
    serving.release()


def test_a_second_capture_at_the_same_time_is_refused(store: WeightStore) -> None:
    with store.writing(1), pytest.raises(SyncError, match="another capture"), store.writing(2):
        pass


def test_what_is_being_written_cannot_be_leased(store: WeightStore) -> None:
    publish(store, 1)
    with store.writing(2) as arena, pytest.raises(SyncError, match="no version"):
        lease(store, arena.arena_id, 2)


def test_readers_that_race_the_writer_get_their_version_whole_or_an_error(store: WeightStore) -> None:
    newest = [(publish(store, 1), 1)]
    stop, whole = threading.Event(), threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not stop.is_set():
            arena_id, version = newest[0]
            try:
                held = lease(store, arena_id, version, "reader")
            except SyncError:
                continue
            values = {int(held.array.min()), int(held.array.max())}
            if values != {version % 251}:
                torn.append(f"{version}: {values}")
            held.release()
            whole.set()

    def breathe() -> None:
        """A writer without a breath overtakes every reader."""
        whole.clear()
        assert whole.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for version in range(2, 300):
            try:
                newest[0] = (publish(store, version), version)
            except SyncError:
                # Both arenas are taken for this moment; the next version will do.
                continue
            if version % 20 == 0:
                breathe()
        breathe()
    finally:
        stop.set()
        reader.join()
    assert torn == []
