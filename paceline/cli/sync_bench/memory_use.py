"""How much memory the processes of a sync use: what is theirs alone, and the arenas once.

From `/proc/PID/smaps_rollup`: anonymous and file pages as each process's share, shared memory (the arenas) summed over
all processes that map it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import SyncError


def memory_of(used: Sequence[int], all_mapping: Sequence[int]) -> int:
    """Bytes of the processes `used` (pids) and of the arenas, which every one of `all_mapping` may share.

    Raises:
        SyncError: a process is gone.
    """
    own = sum(sum(_pss(pid, key) for key in ("Pss_Anon", "Pss_File")) for pid in used)
    return own + sum(_pss(pid, "Pss_Shmem") for pid in all_mapping)


def _pss(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise SyncError(f"process {pid} of the benchmark is gone") from error
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
