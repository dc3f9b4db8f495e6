"""The store's directory: for its user alone, and cleared when its owner has died (C24 e and f)."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

from paceline.store.store_home import StoreHome
from paceline.store.weight_store import WeightStore

OWNER = """
import sys, time
from paceline.store.weight_store import WeightStore
store = WeightStore(directory=sys.argv[1], arenas=2, capacity=8192, kind="file")
print(store.address, flush=True)
time.sleep(600)
"""


def test_only_its_user_may_enter(tmp_path: Path) -> None:
    home = StoreHome(str(tmp_path))
    assert Path(home.path).parent == tmp_path
    assert stat.S_IMODE(Path(home.path).stat().st_mode) == 0o700
    home.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_living_owners_home_stays_and_other_things_too(tmp_path: Path) -> None:
    (tmp_path / "store-notes.txt").write_text("mine", encoding="ascii")
    (tmp_path / "runs").mkdir()
    first, second = StoreHome(str(tmp_path)), StoreHome(str(tmp_path))
    assert Path(first.path).is_dir()
    first.remove()
    second.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "store-notes.txt"]


def test_c24_what_a_killed_owner_left_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        home = Path(owner.stdout.readline().strip()).parent
        # As if it had died between making an arena's file and taking its name away.
        (home / "arena-half-made").write_bytes(bytes(4096))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=30)
    assert home.is_dir()
    store = WeightStore(directory=str(tmp_path), arenas=2, capacity=8192, kind="file")
    assert [path.name for path in tmp_path.iterdir()] == [Path(store.address).parent.name]
    with store.writing(1) as arena:
        arena.array[:] = 1
    store.close()
    assert list(tmp_path.iterdir()) == []
