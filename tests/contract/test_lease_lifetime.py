"""When a lease ends, and when not: with its holders and at no other time. Both kinds of arena."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import SyncError
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_reader import ArenaReader
from paceline.store.weight_store import WeightStore
from tests.contract.test_arena import KINDS, READER, over_channel

FORKING_READER = READER.replace(
    "print(", "import os\nchild = os.fork()\nif child == 0:\n    time.sleep(600)\nprint(child, flush=True)\nprint("
)
both_kinds = pytest.mark.parametrize("kind", KINDS)


def becomes(store: WeightStore, holders: list[str]) -> bool:
    """Whether these are, within a time, the ones that keep the next version from its arena."""
    deadline = time.monotonic() + 60
    while store.blocking_holders() != holders and time.monotonic() < deadline:
        time.sleep(0.01)
    return store.blocking_holders() == holders


@both_kinds
def test_a_holder_that_stands_still_keeps_its_lease_until_it_is_ended(kind: ArenaKind, tmp_path: Path) -> None:
    """No time ends a lease, nor does its reader's silence; the store can only name the reader."""
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind=kind)
    with store.writing(1) as arena:
        arena.array[:] = 3
    arguments = [store.address, arena.arena_id, "1", "8192", "replica-0"]
    reader = subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline()
        reader.send_signal(signal.SIGSTOP)
        taken: set[str] = set()
        for version in range(2, 30):
            with store.writing(version) as other:
                taken.add(other.arena_id)
        assert len(taken) == 1
        newest = over_channel(store, taken.pop(), 8192, version=29)
        assert store.blocking_holders() == ["replica-0"]
        assert (np.asarray(arena.array) == 3).all()
    finally:
        reader.kill()
        reader.communicate(timeout=30)
    assert store.blocking_holders() == []
    newest.release()
    store.close()


@both_kinds
def test_a_child_that_a_holder_forked_holds_with_it(kind: ArenaKind, tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind=kind)
    with store.writing(1) as arena:
        arena.array[:] = 3
    arguments = [store.address, arena.arena_id, "1", "8192", "replica-0"]
    reader = subprocess.Popen([sys.executable, "-c", FORKING_READER, *arguments], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    child = int(reader.stdout.readline())
    try:
        reader.kill()
        reader.wait(timeout=30)
        with store.writing(2) as other:
            assert other is not arena
        newest = over_channel(store, other.arena_id, 8192, version=2)
        assert store.blocking_holders() == ["replica-0"]
    finally:
        os.kill(child, signal.SIGKILL)
        reader.stdout.close()
    assert becomes(store, [])
    newest.release()
    store.close()


@both_kinds
def test_who_closes_its_connection_keeps_its_lease_without_a_name(kind: ArenaKind, tmp_path: Path) -> None:
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind=kind)
    with store.writing(1) as arena:
        arena.array[:] = 3
    reader = ArenaReader()
    lease, connection = reader.lease(
        address=store.address,
        arena_id=arena.arena_id,
        version=1,
        total_bytes=8192,
        holder="replica-0",
        deadline_seconds=60,
    )
    connection.close()
    with store.writing(2) as second:
        pass
    newest = over_channel(store, second.arena_id, 8192, version=2)
    assert becomes(store, [f"an unnamed holder of arena {arena.arena_id}"])
    with pytest.raises(SyncError, match="held by an unnamed holder"), store.writing(3):
        pass
    lease.release()
    assert store.blocking_holders() == []
    newest.release()
    store.close()
