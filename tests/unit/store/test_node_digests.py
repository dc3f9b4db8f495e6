"""One process of a node hashes for all, whatever becomes of the one that has the turn."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.store.node_digests import NodeDigests

PATIENCE = 60.0  # seconds, for what comes at once


class Counting:
    """Takes a digest and counts how often."""

    def __init__(self, digest: str = "d1") -> None:
        self.taken = 0
        self._digest = digest

    def __call__(self) -> str:
        self.taken += 1
        return self._digest


def test_the_second_reads_what_the_first_has_taken(tmp_path: Path) -> None:
    first, second = Counting(), Counting("other")
    assert NodeDigests(str(tmp_path)).once("n", "object-1", "replica-0", first, PATIENCE) == ("d1", "replica-0")
    assert NodeDigests(str(tmp_path)).once("n", "object-1", "replica-1", second, PATIENCE) == ("d1", "replica-0")
    assert (first.taken, second.taken) == (1, 0)


def test_other_bytes_and_other_nodes_are_other_digests(tmp_path: Path) -> None:
    digests, take = NodeDigests(str(tmp_path)), Counting()
    for node, key in (("n", "object-1"), ("n", "object-2"), ("m", "object-1")):
        assert digests.once(node, key, "replica-0", take, PATIENCE) == ("d1", "replica-0")
    assert take.taken == 3


def test_many_at_once_hash_once(tmp_path: Path) -> None:
    take, found = Counting(), []

    def ask(index: int) -> None:
        found.append(NodeDigests(str(tmp_path)).once("n", "object-1", f"replica-{index}", take, PATIENCE))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert take.taken == 1
    assert len(set(found)) == 1


def test_what_fails_is_taken_by_the_next(tmp_path: Path) -> None:
    def boom() -> str:
        raise ValueError("boom")

    digests = NodeDigests(str(tmp_path))
    with pytest.raises(ValueError, match="boom"):
        digests.once("n", "object-1", "replica-0", boom, PATIENCE)
    assert digests.once("n", "object-1", "replica-1", Counting(), PATIENCE) == ("d1", "replica-1")


def test_one_that_hangs_is_not_waited_for_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digests, take = NodeDigests(str(tmp_path)), Counting()

    def hang() -> str:
        assert digests.once("n", "object-1", "replica-1", take, 0.05) == ("d1", "replica-1")
        return "d0"

    assert digests.once("n", "object-1", "replica-0", hang, PATIENCE) == ("d0", "replica-0")
    assert take.taken == 1
    assert "replica-1 hashes for itself: replica-0 is still at it" in caplog.text


DYING = """
import os, sys
from paceline.store.node_digests import NodeDigests
NodeDigests(sys.argv[1]).once("n", "object-1", "dying", lambda: os.kill(os.getpid(), 9), 60)
"""


def test_one_that_is_killed_while_it_hashes_is_replaced(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -9
    assert NodeDigests(str(tmp_path)).once("n", "object-1", "replica-0", Counting(), PATIENCE) == ("d1", "replica-0")


@pytest.mark.parametrize("content", [b"", b"null", b'"someone"', b'{"digest":""}', b"\xff", b"x" * 5000])
def test_what_is_no_entry_is_taken_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "object-1").write_bytes(content)
    assert NodeDigests(str(tmp_path)).once("n", "object-1", "replica-0", Counting(), PATIENCE) == ("d1", "replica-0")
    assert NodeDigests(str(tmp_path)).once("n", "object-1", "replica-1", Counting("x"), PATIENCE) == ("d1", "replica-0")


def test_without_files_every_one_hashes_for_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    digests, take = NodeDigests(str(tmp_path / "file")), Counting()
    for name in ("replica-0", "replica-1"):
        assert digests.once("n", "object-1", name, take, PATIENCE) == ("d1", name)
    assert take.taken == 2


def test_old_versions_leave_no_files(tmp_path: Path) -> None:
    digests = NodeDigests(str(tmp_path))
    for version in range(50):
        digests.once("n", f"object-{version}", "replica-0", Counting(), PATIENCE)
    assert len(list((tmp_path / "n").iterdir())) < 12
    assert digests.once("n", "object-49", "replica-1", Counting("x"), PATIENCE) == ("d1", "replica-0")
