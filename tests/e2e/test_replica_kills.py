"""SIGKILL of a replica at three points of a sync; `benchmarks/kill_replica.py` does it at all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_replica import strike


@pytest.mark.slow
def test_every_run_goes_on_and_every_sample_ends_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = ["staged", "bound", "queue_version"]
    code = strike(tmp_path / "kills", points, kills_per_run=3, updates_per_kill=50)
    said = capsys.readouterr().out
    assert code == 0, said
    assert "3 kills in" in said
