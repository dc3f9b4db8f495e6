"""How many processes a reward function has left behind in its process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def left_behind() -> tuple[int, int]:
    """Children of this process that live, and those that have ended and nobody has reaped."""
    living = ended = 0
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            for pid in file.read_text(encoding="ascii").split():
                state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
                ended += state.split()[0] == "Z"
                living += state.split()[0] != "Z"
    return living, ended
