"""`paceline bench sync` over the engine between nodes: real actors, real objects, full versions and deltas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.sync_bench.model_shapes import shapes_of

pytestmark = pytest.mark.e2e

COMMAND = "from paceline.cli.main import entry_point; entry_point()"


def test_ray_object_is_measured_in_both_modes_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "sync.json"
    options = "bench sync --gib 0.05 --replicas 2 --engines ray_object --modes full,delta --apply mapped --peers none"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *options.split(), "--rounds", "2", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, delta = json.loads(file.read_text(encoding="utf-8"))["results"]
    nbytes = shapes_of(0.05).nbytes
    assert (full["engine"], full["mode"], full["bytes_moved"]) == ("ray_object", "full", nbytes)
    assert delta["mode"] == "delta"
    assert 0 < delta["bytes_moved"] < 0.05 * nbytes
    assert "memcpy" in done.stdout
