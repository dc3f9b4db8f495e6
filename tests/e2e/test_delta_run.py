"""The measured run of deltas on a real cluster, in short: the shipped model, three versions, every digest proved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 240


def test_a_run_moves_deltas_and_proves_every_version(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "delta_run.py"
    # Of a model this small the header of a delta is a large part: one per cent instead of 0.3.
    command = [sys.executable, str(script), "--out", str(tmp_path), "--versions", "3", "--most", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "3 versions, each proved by its digest on 2 replicas" in done.stdout
    rows = re.findall(r"^\| (\d) \| (\S+) \| ([\d,]+) \((\w+)\)", done.stdout, re.MULTILINE)
    assert [(version, mode) for version, _, _, mode in rows] == [("0", "full"), ("1", "delta"), ("2", "delta")]
    assert all(float(changed.rstrip("%")) > 0 for _, changed, _, _ in rows[1:])
