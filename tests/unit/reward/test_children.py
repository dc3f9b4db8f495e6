"""What a process is told of its children: living, and ended without being reaped."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess
from paceline.reward.children import Children
children = Children()
print(*children.left_behind())
living = subprocess.Popen(["sleep", "600"])
for _ in range(3):
    pid = os.fork() or os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(*children.left_behind())
os.waitpid(pid, 0)
print(*children.left_behind())
living.kill()
os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
print(*children.left_behind())
living.wait()
print(*children.left_behind())
"""


def test_living_and_ended_children_are_counted() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:-1] == ["0 0", "1 3", "1 2", "0 3", "0 2"]
