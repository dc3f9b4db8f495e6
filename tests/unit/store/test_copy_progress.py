"""The hint of where other copies are: shared by processes, soon forgotten, never needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.store import copy_progress
from paceline.store.copy_progress import CopyBoard

TELLS = """
import sys
from pathlib import Path
from paceline.store.copy_progress import CopyBoard
CopyBoard(Path(sys.argv[1])).of(7).tell(5)
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told is fresh for a minute."""
    monkeypatch.setattr(copy_progress, "_FRESH_NANOSECONDS", 60_000_000_000)


def test_nothing_was_told_at_first(tmp_path: Path) -> None:
    assert CopyBoard(tmp_path).of(1).place() is None


@pytest.mark.usefixtures("patient")
def test_another_process_is_heard_about_the_same_version_alone(tmp_path: Path) -> None:
    board = CopyBoard(tmp_path)
    subprocess.run([sys.executable, "-c", TELLS, str(tmp_path)], check=True, timeout=60)
    assert board.of(7).place() == 5
    assert board.of(8).place() is None
    board.of(8).tell(2)
    assert (board.of(7).place(), board.of(8).place()) == (None, 2)


def test_what_was_told_some_time_ago_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopyBoard(tmp_path).of(1)
    copies.tell(3)
    monkeypatch.setattr(copy_progress, "_FRESH_NANOSECONDS", 0)
    assert copies.place() is None


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("written", [(1, 9, -(1 << 62)), (1, 9, 1 << 62), (0, 9, 0)])
def test_what_was_told_in_another_time_is_no_place(tmp_path: Path, written: tuple[int, int, int]) -> None:
    board = CopyBoard(tmp_path)
    board.of(1)._slot[:] = written  # noqa: SLF001
    assert board.of(1).place() is None


@pytest.mark.usefixtures("patient")
def test_where_no_file_can_be_made_a_copy_hears_of_itself_at_most(tmp_path: Path) -> None:
    board = CopyBoard(tmp_path / "gone")
    board.of(1).tell(4)
    assert board.of(1).place() == 4
    assert CopyBoard(tmp_path / "gone").of(1).place() is None


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    CopyBoard(tmp_path).of(1).tell(1)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
