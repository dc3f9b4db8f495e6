"""A run while it lives: verified from outside, light processes are light, a dead replica comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.train_process import ENDLESS, TrainProcess, train

VERIFY = [sys.executable, "-c", "from paceline.cli.main import entry_point; entry_point()", "verify"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainProcess]:
    with train(tmp_path_factory.mktemp("live"), ENDLESS) as run:
        run.until_trained()
        yield run


def verify(run: TrainProcess) -> subprocess.CompletedProcess[str]:
    command = [*VERIFY, str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_outside_process_agrees_with_what_every_replica_serves(live: TrainProcess) -> None:
    done = verify(live)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["replica-0", "replica-1"]
    assert done.stdout.count(": verified, serves ") == 2


@pytest.mark.parametrize("role", ["message_queue", "synchronizer", "rollouter"])
def test_a_light_process_has_no_torch(live: TrainProcess, role: str) -> None:
    maps = Path(f"/proc/{live.until_started(role)}/maps").read_text(encoding="utf-8")
    assert "_raylet" in maps, "the process is not the one that was meant"
    assert "libtorch" not in maps


def test_a_heavy_process_would_be_seen(live: TrainProcess) -> None:
    assert "libtorch" in Path(f"/proc/{live.until_started('trainer')}/maps").read_text(encoding="utf-8")


def test_a_dead_replica_comes_back_and_serves_what_is_published(live: TrainProcess) -> None:
    first = live.until_started("replica-1")
    os.kill(first, signal.SIGKILL)
    starts = live.until(
        lambda: [e for e in live.events("process.started") if e["role"] == "replica-1"][1:], "its second start"
    )
    assert starts[0]["pid"] != first
    confirmed = live.until(
        lambda: [e for e in live.events("sync.confirmed") if e["replica"] == "replica-1" and e["t"] > starts[0]["t"]],
        "a version that it confirms",
    )
    live.until(lambda: live.events("train.step")[-1]["t"] > confirmed[0]["t"], "another update")
    done = verify(live)
    assert (done.returncode, done.stdout.count(": verified, serves ")) == (0, 2), done.stdout + done.stderr


def test_nothing_outlives_the_death_of_the_driver_and_then_nothing_can_be_verified(live: TrainProcess) -> None:
    assert len(live.processes()) > 6
    live.process.kill()
    live.process.wait(timeout=60)
    live.assert_nothing_is_left()
    done = verify(live)
    assert done.returncode == 1
    assert all(line.endswith(" is gone") for line in done.stdout.splitlines()), done.stdout
