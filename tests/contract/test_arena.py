"""One suite for both kinds of arena: never written while leased, free again when the holder is killed."""

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

from paceline.core.errors import CapacityError, DeadlineExceeded, SyncError
from paceline.store.arena import Arena
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_reader import ArenaReader
from paceline.store.lease import reopen_read_only
from paceline.store.mapped_arena import ArenaLease, MappedArena
from paceline.store.weight_store import WeightStore

KINDS: tuple[ArenaKind, ...] = ("memfd", "file")

# A reader in a process of its own: takes a lease, says so, and holds it until it is killed.
READER = """
import sys, time
from paceline.store.arena_reader import ArenaReader
address, arena_id, version, size, holder = sys.argv[1:]
lease, _ = ArenaReader().lease(address=address, arena_id=arena_id, version=int(version), total_bytes=int(size),
                               holder=holder, deadline_seconds=60)
print(int(lease.array.sum()), flush=True)
time.sleep(600)
"""
FAULT = """
import sys
from paceline.store.arena import Arena
from paceline.store.mapped_arena import MappedArena
kind, directory, who = sys.argv[1:]
arena = Arena(4096, kind=kind, directory=directory)
assert arena.begin_write()
arena.array[:] = 1
arena.end_write(1)
mapped = MappedArena(arena.shared_fd, arena_id=arena.arena_id, kind=kind)
lease = mapped.lease(version=1, total_bytes=4096, deadline_seconds=60)
print("leased", flush=True)
(arena if who == "owner" else lease).array[0] = 2
print("written", flush=True)
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> ArenaKind:
    found: ArenaKind = request.param
    return found


@pytest.fixture
def arena(kind: ArenaKind, tmp_path: Path) -> Iterator[Arena]:
    made = Arena(10_000, kind=kind, directory=str(tmp_path))
    yield made
    made.close()


def filled(arena: Arena, value: int, version: int | None) -> None:
    assert arena.begin_write()
    arena.array[:] = value
    arena.end_write(version)


def mapped(arena: Arena) -> MappedArena:
    return MappedArena(arena.shared_fd, arena_id=arena.arena_id, kind=arena.kind)


def leased(arena: Arena, version: int = 1, total_bytes: int = 10_000, deadline: float = 60.0) -> ArenaLease:
    return mapped(arena).lease(version=version, total_bytes=total_bytes, deadline_seconds=deadline)


def over_channel(store: WeightStore, arena_id: str, total_bytes: int, version: int = 1) -> ArenaLease:
    lease, _ = ArenaReader().lease(
        address=store.address,
        arena_id=arena_id,
        version=version,
        total_bytes=total_bytes,
        holder="r",
        deadline_seconds=60,
    )
    return lease


def test_the_seals_of_a_memfd_refuse_every_other_writer_and_size(tmp_path: Path) -> None:
    arena = Arena(10_000, kind="memfd", directory=str(tmp_path))
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
        arena.close()


def test_a_lease_sees_the_bytes_and_keeps_the_writer_out(arena: Arena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    assert (lease.array == 7).all()
    assert arena.is_leased()
    assert not arena.begin_write()
    lease.release()
    assert not arena.is_leased()
    filled(arena, 8, version=2)


def test_one_map_serves_lease_after_lease(arena: Arena) -> None:
    filled(arena, 7, version=1)
    kept = mapped(arena)
    one = kept.lease(version=1, total_bytes=10_000, deadline_seconds=60)
    two = kept.lease(version=1, total_bytes=10_000, deadline_seconds=60)
    one.release()
    assert arena.is_leased()
    two.release()
    assert not arena.is_leased()
    filled(arena, 8, version=2)
    with pytest.raises(SyncError, match="version 1 is gone"):
        kept.lease(version=1, total_bytes=10_000, deadline_seconds=60)
    three = kept.lease(version=2, total_bytes=10_000, deadline_seconds=60)
    assert (three.array == 8).all()
    assert three.array.ctypes.data == kept.lease(version=2, total_bytes=1, deadline_seconds=60).array.ctypes.data


def test_a_lease_lasts_as_long_as_a_view_of_its_bytes(arena: Arena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    view = lease.array[100:200]
    lease.release()
    assert arena.is_leased()
    assert (view == 7).all()
    del view
    assert not arena.is_leased()


def test_a_forgotten_lease_ends_with_its_last_reference(arena: Arena) -> None:
    filled(arena, 7, version=1)
    lease = leased(arena)
    assert arena.is_leased()
    del lease
    assert not arena.is_leased()


def test_another_version_than_asked_for_is_refused_and_leaves_no_lease(arena: Arena) -> None:
    for version, held in ((None, "no version"), (2, "version 2")):
        filled(arena, 7, version)
        with pytest.raises(SyncError, match=f"holds {held}"):
            leased(arena)
        assert not arena.is_leased()


def test_a_reader_that_comes_between_is_refused(arena: Arena) -> None:
    """The descriptor was passed for version 1; the arena is reused before the reader has its lock."""
    filled(arena, 1, version=1)
    assert arena.begin_write()
    with pytest.raises(DeadlineExceeded) as caught:
        leased(arena, deadline=0.02)
    assert caught.value.culprit == "weight store"
    arena.end_write(2)
    with pytest.raises(SyncError, match="version 1 is gone"):
        leased(arena)


def test_a_descriptor_that_is_no_arena_is_refused(arena: Arena, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(20_480))
    with plain.open("rb") as file:
        with pytest.raises(SyncError, match="not sealed"):
            MappedArena(file.fileno(), arena_id="x", kind="memfd")
        with pytest.raises(SyncError, match="has a name or holes"):
            MappedArena(file.fileno(), arena_id="x", kind="file")
    filled(arena, 1, version=1)
    with pytest.raises(SyncError, match="claims 99999 bytes"):
        leased(arena, total_bytes=99_999)


def test_a_file_with_holes_is_refused(tmp_path: Path) -> None:
    holes = tmp_path / "holes"
    with holes.open("w+b") as file:
        file.truncate(1 << 20)
        holes.unlink()
        with pytest.raises(SyncError, match="has a name or holes"):
            MappedArena(file.fileno(), arena_id="x", kind="file")


def test_a_file_without_an_arenas_stamp_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"x" * 20_480)
    with plain.open("rb") as file:
        plain.unlink()
        with pytest.raises(SyncError, match="is not an arena"):
            MappedArena(file.fileno(), arena_id="x", kind="file").lease(version=1, total_bytes=1, deadline_seconds=60)


def test_an_owner_that_dies_while_it_writes_leaves_no_version(arena: Arena) -> None:
    filled(arena, 1, version=1)
    assert arena.begin_write()
    copy = reopen_read_only(arena.shared_fd)
    # The lock of a dead owner is gone, the stamp it left is there.
    fcntl.flock(arena._lock_fd, fcntl.LOCK_UN)  # noqa: SLF001
    with pytest.raises(SyncError, match="no version"):
        MappedArena(copy, arena_id=arena.arena_id, kind=arena.kind).lease(
            version=1, total_bytes=10, deadline_seconds=60
        )
    os.close(copy)


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_a_write_to_a_leased_arena_faults(kind: ArenaKind, tmp_path: Path, who: str) -> None:
    arguments = [kind, str(tmp_path), who]
    done = subprocess.run(
        [sys.executable, "-c", FAULT, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "leased\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_a_killed_reader_frees_its_arena_and_its_name(kind: ArenaKind, tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind=kind)
    with store.writing(1) as arena:
        arena.array[:] = 3
    arguments = [store.address, arena.arena_id, "1", "8192", "replica-0"]
    reader = subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == 3 * 8192
        with store.writing(2) as second:
            second.array[:] = 4
        newest = over_channel(store, second.arena_id, 8192, version=2)
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
    newest.release()
    store.close()


def test_what_is_leased_over_the_channel_outlives_the_store(kind: ArenaKind, tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind=kind)
    with store.writing(1) as arena:
        arena.array[:] = 5
    arena_id = arena.arena_id
    lease = over_channel(store, arena_id, 8192)
    del arena
    store.close()
    assert (lease.array == 5).all()
    lease.release()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SyncError, match="is gone"):
        over_channel(store, arena_id, 1)


# ---- room -----------------------------------------------------------------------------------------------------------

# Needs 2 x 64 MiB in a tmpfs of 80 MiB, of which 64 MiB are taken: 16 MiB are left (C24 d).
SMALL_TMPFS = """
mount -t tmpfs -o size=80m none "$1" && head -c 67108864 /dev/zero > "$1/taken" && exec "$2" -c "$3" "$1"
"""
STORE_IN_TMPFS = """
import os, sys
from paceline.core.errors import CapacityError
from paceline.store.weight_store import WeightStore
before = len(os.listdir("/proc/self/fd"))
try:
    WeightStore(directory=sys.argv[1], arenas=2, capacity=64 << 20, kind="file")
except CapacityError as error:
    print(error.message)
print(os.listdir(sys.argv[1]), len(os.listdir("/proc/self/fd")) - before, os.statvfs(sys.argv[1]).f_bavail >> 8)
"""


def test_c24_too_small_a_file_system_is_an_error_with_the_numbers_at_the_start(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_TMPFS, "sh", str(tmp_path)]
    if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces here, so no small file system can be made")
    done = subprocess.run(
        [*command, sys.executable, STORE_IN_TMPFS], capture_output=True, text=True, check=True, timeout=60
    )
    refusal, left = done.stdout.splitlines()
    assert f"needs {(64 << 20) + 4096} bytes" in refusal
    assert f"{16 << 20} bytes are free in " in refusal
    assert left == "['taken'] 0 16"


def test_no_room_leaves_no_arena_behind(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="bytes are free in"):
        WeightStore(directory=str(tmp_path), arenas=2, capacity=1 << 50, kind="file")
    assert list(tmp_path.iterdir()) == []


def test_a_file_arena_has_no_name_and_all_its_blocks(tmp_path: Path) -> None:
    arena = Arena(10_000, kind="file", directory=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(arena.shared_fd)
    assert (found.st_nlink, found.st_mode & 0o777) == (0, 0o400)
    assert found.st_blocks * 512 >= 10_000
    arena.close()
