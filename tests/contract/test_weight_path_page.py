"""The documented example is the one that runs, is short, and needs the base install alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sync_two_processes.py"
# Runs the example in a process in which what the base install lacks cannot be imported.
BASE_ALONE = """
import runpy, sys
for absent in ("ray", "transformers", "typer", "rich", "omegaconf", "tensorboard"):
    sys.modules[absent] = None
runpy.run_path(sys.argv[1], run_name="__main__")
loops = ("paceline.train", "paceline.rollout", "paceline.message_queue", "paceline.sync", "paceline.runtime")
print([name for name in sys.modules if name.startswith(loops)])
"""


def test_the_page_shows_the_example_and_what_it_prints() -> None:
    page = (ROOT / "docs" / "weight_path.md").read_text(encoding="utf-8")
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 30
    assert f"```python\n{source}```" in page
    done = subprocess.run(
        [sys.executable, "-c", BASE_ALONE, str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    printed, _, loaded = done.stdout.rstrip().rpartition("\n")
    assert f"```\n{printed}\n```" in page
    assert loaded == "[]"
    assert done.stderr == ""
