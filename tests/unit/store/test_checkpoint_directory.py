"""C21: a crash or a full disk while saving; torn, truncated and foreign checkpoints; retention."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import CheckpointError
from paceline.store.checkpoint_directory import (
    CheckpointDirectory,
    clear_left_overs,
    newest_checkpoint,
    verify_checkpoint,
)

PARTS = {"rollouter.msgpack": b"rollouter" * 100, "meta.json": b"{}"}
TRAINER_FILES = ("weights", "moments", "random")


def store(root: Path, *, keep: int = 1, life: int = 1) -> CheckpointDirectory:
    return CheckpointDirectory(root, life=life, keep=keep, journal=root / "journal")


def writes(step: int, *, finite: bool = True) -> Callable[[str], bool]:
    """The trainer's three files."""

    def write(directory: str) -> bool:
        for name in TRAINER_FILES:
            (Path(directory) / name).write_bytes(name.encode() * step)
        return finite

    return write


def full_disk(directory: str) -> bool:
    (Path(directory) / "weights").write_bytes(b"w")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    store(tmp_path).save(10, writes(10), PARTS)
    with pytest.raises(CheckpointError, match="checkpoint of update 20: No space left on device"):
        store(tmp_path).save(20, full_disk, PARTS)
    assert names(tmp_path) == ["global_step_10"]
    assert newest_checkpoint(tmp_path) == (tmp_path / "global_step_10", [])


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.store.checkpoint_directory import CheckpointDirectory

def write(directory):
    (Path(directory) / "weights").write_bytes(b"w" * 20)
    if sys.argv[2] == "trainer":
        os.kill(os.getpid(), signal.SIGKILL)
    return True

class Parts(dict):
    def items(self):
        os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
CheckpointDirectory(root, life=1, keep=1, journal=root / "journal").save(20, write, Parts())
"""


@pytest.mark.parametrize("killed_in", ["trainer", "rollouter"])
def test_a_killed_writer_leaves_the_last_good_one_and_its_rest_is_cleared(tmp_path: Path, killed_in: str) -> None:
    store(tmp_path).save(10, writes(10), PARTS)
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), killed_in], check=False).returncode == -9
    assert names(tmp_path) == [".saving-20", "global_step_10"]
    assert newest_checkpoint(tmp_path) == (tmp_path / "global_step_10", [])
    clear_left_overs(tmp_path)
    assert names(tmp_path) == ["global_step_10"]


def test_the_new_one_takes_the_place_of_the_old_one_once_it_is_whole(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def write(directory: str) -> bool:
        seen.append(names(tmp_path))
        return writes(20)(directory)

    store(tmp_path).save(10, writes(10), PARTS)
    size = store(tmp_path).save(20, write, PARTS)
    assert seen == [[".saving-20", "global_step_10"]]
    assert names(tmp_path) == ["global_step_20"]
    assert newest_checkpoint(tmp_path) == (tmp_path / "global_step_20", [])
    files = [path for path in (tmp_path / "global_step_20").iterdir() if path.name != "COMPLETE"]
    assert size == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("name", [*TRAINER_FILES, *PARTS])
def test_a_truncated_file_is_refused_by_name_and_the_one_before_is_chosen(tmp_path: Path, name: str) -> None:
    for step in (10, 20):
        store(tmp_path, keep=2).save(step, writes(step), PARTS)
    (tmp_path / "global_step_20" / name).write_bytes(b"")
    chosen, refused = newest_checkpoint(tmp_path)
    assert chosen == tmp_path / "global_step_10"
    assert len(refused) == 1
    assert refused[0].startswith(f"global_step_20: {name} has 0 bytes, not ")


@pytest.mark.parametrize("name", [*TRAINER_FILES, *PARTS, "digests.json", "COMPLETE"])
def test_one_flipped_bit_is_refused(tmp_path: Path, name: str) -> None:
    store(tmp_path).save(10, writes(10), PARTS)
    path = tmp_path / "global_step_10" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="global_step_10"):
        verify_checkpoint(path.parent)
    assert newest_checkpoint(tmp_path)[0] is None


@pytest.mark.parametrize("name", ["COMPLETE", "digests.json", "weights"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    store(tmp_path).save(10, writes(10), PARTS)
    (tmp_path / "global_step_10" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(tmp_path / "global_step_10")


def test_a_foreign_directory_is_never_chosen(tmp_path: Path) -> None:
    store(tmp_path).save(10, writes(10), PARTS)
    (tmp_path / "global_step_999").mkdir()
    (tmp_path / "global_step_999" / "actor.pt").write_bytes(b"x" * 10)
    chosen, refused = newest_checkpoint(tmp_path)
    assert chosen == tmp_path / "global_step_10"
    assert refused == ["global_step_999: not complete, it has no COMPLETE"]


def test_nothing_is_there(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "checkpoints") == (None, [])


def test_as_many_as_wanted_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 10):
        store(tmp_path, keep=3).save(step, writes(step), PARTS)
    assert names(tmp_path) == ["global_step_10", "global_step_4", "global_step_6"]


def test_a_checkpoint_that_is_not_finite_never_displaces_the_newest_finite_one(tmp_path: Path) -> None:
    for step in (2, 4):
        store(tmp_path, keep=2).save(step, writes(step), PARTS)
    for step in (6, 8, 10):
        store(tmp_path, keep=2).save(step, writes(step, finite=False), PARTS)
    assert names(tmp_path) == ["global_step_10", "global_step_4", "global_step_8"]
    chosen, refused = newest_checkpoint(tmp_path)
    assert chosen == tmp_path / "global_step_4"
    assert refused == ["global_step_10: its weights are not finite", "global_step_8: its weights are not finite"]


def test_a_torn_one_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    for step in (2, 4):
        store(tmp_path, keep=2).save(step, writes(step), PARTS)
    (tmp_path / "global_step_4" / "weights").write_bytes(b"")
    store(tmp_path, keep=2).save(6, writes(6), PARTS)
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "global_step_6"
    assert (tmp_path / "global_step_2").is_dir()


def test_a_later_life_wins_over_a_later_update_and_replaces_an_equal_one(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        store(tmp_path, keep=3).save(step, writes(step), PARTS)
    store(tmp_path, keep=3, life=2).save(4, writes(5), PARTS)
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "global_step_4"
    assert verify_checkpoint(tmp_path / "global_step_4").life == 2
    assert names(tmp_path) == ["global_step_2", "global_step_4", "global_step_6"]


def test_journals_that_are_not_needed_any_more_go_with_the_next_whole_checkpoint(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    for name in ("r.1.1.bin", "r.2.1.bin", "r.2.2.bin", "other.2.1.bin"):
        (journal / name).write_bytes(b"")
    saving = store(tmp_path / "checkpoints", life=2)
    saving = CheckpointDirectory(tmp_path / "checkpoints", life=2, keep=1, journal=journal)
    saving.begin()
    (journal / "r.2.3.bin").write_bytes(b"")  # begun after the cut: what came before it is needed still
    with pytest.raises(CheckpointError):
        saving.save(3, full_disk, PARTS)
    assert len(names(journal)) == 5
    saving.begin()
    (journal / "other.2.2.bin").write_bytes(b"")
    saving.save(4, writes(4), PARTS)
    assert names(journal) == ["other.2.1.bin", "other.2.2.bin", "r.2.3.bin"]
