"""Surroundings that a run has no say in: no home, a bare terminal, another directory, a reader that leaves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.e2e.train_process import PROGRAM, read_text

TINY = ["rollout.total_rollout_steps=128", "data.val_size=20", "rollout.num_replicas=1"]


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """Without HOME, on a bare terminal, from a directory that is not the run's; stdout closed after one line."""
    elsewhere, runs = tmp_path / "elsewhere", tmp_path / "runs of mine"
    elsewhere.mkdir(mode=0o555)
    file = tmp_path / "run.yaml"
    file.write_text(f"# a comment\ntrainer:\n  default_local_dir: {json.dumps(str(runs))}\n  seed: 3  # another\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "TERM")}
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            [*PROGRAM, "train", "-c", str(file), *TINY, "trainer.seed=5"],
            cwd=elsewhere,
            env={**environ, "TERM": "dumb"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
        )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"run directory="), read_text(tmp_path / "err")
        process.stdout.close()
        assert process.wait(timeout=240) == 0, read_text(tmp_path / "err")
    assert read_text(tmp_path / "err") == ""
    (summary,) = runs.glob("*/*/*/summary.json")
    assert json.loads(read_text(summary))["outcome"] == "completed"
    assert "seed: 5" in read_text(summary.parent / "config.yaml")
    assert list(elsewhere.iterdir()) == []
