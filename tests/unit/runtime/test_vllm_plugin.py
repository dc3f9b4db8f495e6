"""A process that vLLM has started for an engine of ours ends with the one that has started it, however that ends."""

from __future__ import annotations

import subprocess
import sys
import threading

from paceline.runtime.vllm_plugin import end_with_parent

PATIENCE_SECONDS = 30.0


def test_a_child_of_a_killed_parent_is_gone() -> None:
    command = [sys.executable, "-m", "tests.unit.runtime.spawning_parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.communicate(timeout=PATIENCE_SECONDS)  # ends when nobody is left who could write


def test_a_process_that_nobody_spawned_is_left_alone() -> None:
    before = set(threading.enumerate())
    end_with_parent()
    assert set(threading.enumerate()) <= before  # one of a test before this one may end meanwhile
