"""A replica's process is killed: vLLM's processes below it end by themselves."""

from __future__ import annotations

import subprocess
import sys

from paceline.runtime.process_tree import read_table

PATIENCE_SECONDS = 120.0


def test_nothing_is_left_of_an_engine_whose_process_was_killed() -> None:
    command = [sys.executable, "-m", "tests.vllm.engine_owner"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert any(line == b"started\n" for line in owner.stdout)
        assert any(row.parent_pid == owner.pid for row in read_table().values()), "vLLM has processes of its own"
        owner.kill()
        owner.communicate(timeout=PATIENCE_SECONDS)  # ends when nobody is left who could write
