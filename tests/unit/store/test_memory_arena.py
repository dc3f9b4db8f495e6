"""Arenas across processes: sealed, never written while leased, and free again when the holder is killed."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.store.lease import reopen_read_only
from paceline.store.mapped_arena import MappedArena, lease_arena
from paceline.store.memory_arena import MemoryArena
from paceline.store.weight_store import WeightStore

# A reader in a process of its own: takes a lease, says so, and holds it until it is killed.
READER = """
import sys, time
from paceline.store.mapped_arena import lease_arena
address, arena_id, version, size, holder = sys.argv[1:]
mapped = lease_arena(address=address, arena_id=arena_id, version=int(version), total_bytes=int(size),
                     holder=holder, deadline_seconds=10)
print(int(mapped.array.sum()), flush=True)
time.sleep(600)
"""
FAULT = """
from paceline.store.memory_arena import MemoryArena
from paceline.store.mapped_arena import MappedArena
arena = MemoryArena(4096)
assert arena.begin_write()
arena.array[:] = 1
arena.end_write(1)
lease = MappedArena(arena.shared_fd, arena_id=arena.arena_id, version=1, total_bytes=4096, deadline_seconds=1)
print("leased", flush=True)
arena.array[0] = 2
print("written", flush=True)
"""


@pytest.fixture
def arena() -> Iterator[MemoryArena]:
    made = MemoryArena(10_000)
    yield made
    made.close()


def filled(arena: MemoryArena, value: int, version: int | None) -> None:
    assert arena.begin_write()
    arena.array[:] = value
    arena.end_write(version)


def leased(arena: MemoryArena, version: int = 1, total_bytes: int = 10_000, deadline: float = 1.0) -> MappedArena:
    return MappedArena(
        arena.shared_fd,
        arena_id=arena.arena_id,
        version=version,
        total_bytes=total_bytes,
        deadline_seconds=deadline,
    )


def test_the_seals_refuse_every_other_writer_and_size(arena: MemoryArena) -> None:
    writable = os.open(f"/proc/self/fd/{arena.shared_fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(writable, 4096)
        for change in (lambda: os.write(writable, b"x"), lambda: os.ftruncate(writable, 0)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 1 << 20)
        with pytest.raises(PermissionError):
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(writable)


def test_a_lease_sees_the_bytes_and_keeps_the_writer_out(arena: MemoryArena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    assert (lease.array == 7).all()
    assert arena.is_leased()
    assert not arena.begin_write()
    lease.release()
    assert not arena.is_leased()
    filled(arena, 8, version=2)


def test_a_reader_writes_only_for_itself(arena: MemoryArena) -> None:
    filled(arena, 7, version=1)
    one, two = leased(arena), leased(arena)
    one.array[3] = 99
    assert (two.array[3], arena.array[3]) == (7, 7)
    one.release()
    assert arena.is_leased()
    two.release()
    assert not arena.is_leased()


def test_a_lease_lasts_as_long_as_a_view_of_its_bytes(arena: MemoryArena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    view = lease.array[100:200]
    lease.release()
    assert arena.is_leased()
    assert (view == 7).all()
    del view
    assert not arena.is_leased()


def test_a_forgotten_lease_ends_with_its_last_reference(arena: MemoryArena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    assert arena.is_leased()
    del lease
    assert not arena.is_leased()


def test_another_version_than_asked_for_is_refused_and_leaves_no_lease(arena: MemoryArena) -> None:
    for version, held in ((None, "no version"), (2, "version 2")):
        filled(arena, 7, version)
        with pytest.raises(SyncError, match=f"holds {held}"):
            leased(arena)
        assert not arena.is_leased()


def test_a_reader_that_comes_between_is_refused(arena: MemoryArena) -> None:
    """The descriptor was passed for version 1; the arena is reused before the reader has its lock."""
    filled(arena, 1, version=1)
    assert arena.begin_write()
    with pytest.raises(DeadlineExceeded) as caught:
        leased(arena, deadline=0.02)
    assert caught.value.culprit == "weight store"
    arena.end_write(2)
    with pytest.raises(SyncError, match="version 1 is gone"):
        leased(arena)


def test_a_descriptor_that_is_no_arena_is_refused(arena: MemoryArena, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(20_480))
    with plain.open("rb") as file, pytest.raises(SyncError, match="not sealed"):
        MappedArena(file.fileno(), arena_id="x", version=1, total_bytes=10, deadline_seconds=1)
    filled(arena, 1, version=1)
    with pytest.raises(SyncError, match="claims 99999 bytes"):
        leased(arena, total_bytes=99_999)


def test_an_owner_that_dies_while_it_writes_leaves_no_version(arena: MemoryArena) -> None:
    filled(arena, 1, version=1)
    assert arena.begin_write()
    copy = reopen_read_only(arena.shared_fd)
    # The lock of a dead owner is gone, the stamp it left is there.
    fcntl.flock(arena._lock_fd, fcntl.LOCK_UN)  # noqa: SLF001
    with pytest.raises(SyncError, match="no version"):
        MappedArena(copy, arena_id=arena.arena_id, version=1, total_bytes=10, deadline_seconds=1)
    os.close(copy)


def test_the_owners_write_to_a_leased_arena_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "leased\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_a_killed_reader_frees_its_arena_and_its_name(tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192)
    with store.writing(1) as arena:
        arena.array[:] = 3
    arguments = [store.address, arena.arena_id, "1", "8192", "replica-0"]
    reader = subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == 3 * 8192
        with store.writing(2) as second:
            second.array[:] = 4
        assert store.blocking_holders() == ["replica-0"]
        with pytest.raises(SyncError, match="held by replica-0"), store.writing(3):
            pass
        assert (np.asarray(arena.array) == 3).all()
    finally:
        reader.kill()
        reader.communicate(timeout=30)
    assert store.blocking_holders() == []
    with store.writing(3) as third:
        assert third is arena
    store.close()


def test_what_is_leased_over_the_channel_outlives_the_store(tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192)
    with store.writing(1) as arena:
        arena.array[:] = 5
    arena_id = arena.arena_id
    lease = lease_arena(
        address=store.address, arena_id=arena_id, version=1, total_bytes=8192, holder="r", deadline_seconds=5
    )
    address = store.address
    del arena
    store.close()
    assert (lease.array == 5).all()
    lease.release()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SyncError, match="is gone"):
        lease_arena(address=address, arena_id=arena_id, version=1, total_bytes=1, holder="r", deadline_seconds=1)
