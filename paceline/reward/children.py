"""How many processes a reward function has left behind in its process.

Looked at after every call: a child that has ended is looked at once, however many of them nobody reaps.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class Children:
    """The children of this process."""

    def __init__(self) -> None:
        self._ended: set[str] = set()  # and not reaped: their numbers stay theirs

    def left_behind(self) -> tuple[int, int]:
        """Children that live, and those that have ended and nobody has reaped."""
        found: set[str] = set()
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                found.update((thread / "children").read_text(encoding="ascii").split())
        self._ended &= found
        self._ended.update(pid for pid in found - self._ended if _has_ended(pid))
        return len(found) - len(self._ended), len(self._ended)


def _has_ended(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # and has been reaped meanwhile
    return stat.rpartition(")")[2].split()[0] in "ZX"
