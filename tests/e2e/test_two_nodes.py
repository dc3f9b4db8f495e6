"""`checkpoint_engine.backend=ray_object` on a cluster of two nodes, and on the one node of an ordinary run."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.train_process import SHORT, START_SECONDS, STOP_SECONDS, train

ROOT = Path(__file__).parents[2]
OBJECT_OVERHEAD = 4096  # Ray's own header of an object
CHUNK_BYTES = 5 << 20  # of Ray's object manager
SYNCS = 6


def run_apart(module: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """The result of a module that starts a cluster, in a process of its own."""
    # Short, since the paths of sockets may have 107 bytes only; the process guard takes no other names.
    temporary = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
    result = directory / f"{secrets.token_hex(4)}.json"
    command = [sys.executable, "-m", module, *arguments, temporary, str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not Path(temporary).exists()
    found: dict[str, Any] = json.loads(result.read_bytes())
    return found


@pytest.fixture(scope="module")
def transferred(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_apart("tests.e2e.two_nodes", tmp_path_factory.mktemp("transfer"), "transfer")


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_apart("tests.e2e.two_nodes", tmp_path_factory.mktemp("death"), "death")


@pytest.mark.slow
def test_the_bytes_cross_once_for_four_replicas(transferred: dict[str, Any]) -> None:
    total = transferred["total_bytes"]
    assert total > 24 << 20
    assert total <= transferred["bytes_created_on_second"] <= total + OBJECT_OVERHEAD
    assert transferred["chunks_received_by_second"] == -(-total // CHUNK_BYTES)
    assert transferred["chunks_received_by_first"] == 0


@pytest.mark.slow
def test_both_nodes_have_the_published_digest_and_bytes(transferred: dict[str, Any]) -> None:
    assert transferred["digests"] == [transferred["published"]] * 5
    assert transferred["same_tensors"] == [True] * 5


@pytest.mark.slow
def test_fifty_syncs_fit_into_a_store_of_three_versions(transferred: dict[str, Any]) -> None:
    most = 3 * (transferred["total_bytes"] + OBJECT_OVERHEAD)
    for samples in transferred["used"].values():
        assert len(samples) == 50
        assert max(samples) <= most
    assert transferred["spilled"] == transferred["fallback"] == [0, 0]


@pytest.mark.slow
def test_a_holder_is_named_and_its_death_ends_its_lease(transferred: dict[str, Any]) -> None:
    assert transferred["blocked"] == "SyncError: no free arena for version 54: held by replica-3"
    assert transferred["after_death"] == [True] * 4


@pytest.mark.slow
def test_a_node_that_dies_is_an_error_with_its_name(died: dict[str, Any]) -> None:
    place = died["place"]
    assert place.startswith("node second (")
    for kind, called in (("pending", "wait"), ("later", "stage")):
        assert died[kind] == [f"WorkerDied: replica-{i} on {place} died while {called} was called" for i in range(4)]
    assert died["lost_owner"] == f"WorkerDied: trainer on {place} died before replica-5 had its weights"
    assert died["staged"] == [True] * 5
    assert died["first_goes_on"]


@pytest.mark.slow
def test_an_owner_that_does_not_answer_is_an_error_with_its_name(died: dict[str, Any]) -> None:
    place = died["place"]
    assert died["silent_owner"] == (
        f"DeadlineExceeded: replica-6 waited 3 s for weights from trainer on {place}: they did not come"
    )


@pytest.mark.slow
def test_a_run_trains_with_its_replicas_on_another_node(tmp_path: Path) -> None:
    done = run_apart("tests.e2e.two_node_run", tmp_path)
    summary = done["summary"]
    assert (summary["outcome"], summary["steps"], summary["ledger_errors"]) == ("completed", 10, [])
    assert summary["syncs"]["count"] == summary["syncs"]["verified_count"] == SYNCS
    assert done["confirmed"] == 2 * SYNCS
    # Both replicas lie on the second node, and each version came there once.
    assert done["captured_bytes"] <= done["created_on_second"] <= done["captured_bytes"] + SYNCS * OBJECT_OVERHEAD


@pytest.mark.slow
def test_a_run_trains_on_one_node(tmp_path: Path) -> None:
    with train(tmp_path, ["checkpoint_engine.backend=ray_object", *SHORT]) as run:
        ended = run.end(START_SECONDS)
        assert ended.code == 0, ended
        summary = json.loads((run.run_dir / "summary.json").read_bytes())
        assert summary["syncs"]["count"] == summary["syncs"]["verified_count"] == SYNCS
        run.assert_nothing_is_left(STOP_SECONDS)
