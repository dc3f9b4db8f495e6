"""Ctrl-C and SIGTERM, at any time: down soon, the right exit code, a summary, and nothing left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.train_process import ENDLESS, STOP_SECONDS, TrainProcess, train


def stop(run: TrainProcess, number: signal.Signals) -> None:
    os.kill(run.process.pid, number)


def stop_group(run: TrainProcess, number: signal.Signals) -> None:
    """As a terminal does for Ctrl-C."""
    os.killpg(run.process.pid, number)


def assert_interrupted(run: TrainProcess, number: signal.Signals) -> None:
    ended = run.end(STOP_SECONDS)
    assert (ended.code, ended.err) == (128 + number, f"paceline: error: stopped by {number.name}\n")
    run.assert_nothing_is_left()
    summary = run.summary()
    assert (summary["outcome"], summary["exit_code"]) == ("interrupted", 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_ray_starts(tmp_path: Path, number: signal.Signals) -> None:
    with train(tmp_path, ENDLESS) as run:
        run.until(lambda: any("gcs_server" in command for command in run.processes().values()), "Ray's first process")
        stop(run, number)
        assert_interrupted(run, number)


def test_while_the_parts_start(tmp_path: Path) -> None:
    with train(tmp_path, ENDLESS) as run:
        run.until_started("message_queue")
        stop_group(run, signal.SIGINT)
        assert_interrupted(run, signal.SIGINT)


def test_while_it_trains(tmp_path: Path) -> None:
    """SIGTERM; for Ctrl-C see the test on a terminal."""
    with train(tmp_path, [*ENDLESS, "rollout.num_replicas=1"]) as run:
        run.until_trained()
        stop(run, signal.SIGTERM)
        assert_interrupted(run, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_anything_is_made(tmp_path: Path, number: signal.Signals) -> None:
    with train(tmp_path, ENDLESS) as run:
        # The interpreter has loaded the program's first modules, and needs a second for the others.
        run.until(lambda: "pydantic" in maps_of(run.process.pid), "pydantic")
        stop(run, number)
        ended = run.end(STOP_SECONDS)
        assert ended.code == 128 + number
        assert ended.err == f"paceline: error: stopped by {number.name}\n"
        run.assert_nothing_is_left()


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
