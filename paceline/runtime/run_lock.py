"""Locks of a run directory: one driver at a time, and none before the processes of the one before are gone.

`driver.lock` is held by the driver, exclusively; `processes.lock` by every process of the run, shared. The kernel
releases both when their holders die, however that happens. A directory whose driver lock is held is a live run; one
whose process lock alone is held is that of a driver that was killed a moment ago.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from paceline.core.errors import DeadlineExceeded

DRIVER_FILE = "driver.lock"
PROCESSES_FILE = "processes.lock"
GONE_SECONDS = 60.0  # the watchdog of a killed driver ends its processes within a few seconds
POLL_SECONDS = 0.05


class RunLock:
    """The driver's hold on a run directory."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, run_dir: Path) -> bool:
        """Become the driver of this directory; False when it has one."""
        descriptor = _open(run_dir / DRIVER_FILE)
        if not _try(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return False
        self.release()
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the directory up. Twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def wait_for_processes(run_dir: Path, seconds: float = GONE_SECONDS) -> None:
    """Return once no process of an earlier life writes here any more; to be called by the driver.

    Raises:
        DeadlineExceeded: some of them live on.
    """
    descriptor = _open(run_dir / PROCESSES_FILE)
    deadline = time.monotonic() + seconds
    try:
        while not _try(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                culprit = f"processes of the run before in {run_dir}"
                raise DeadlineExceeded(f"waited {seconds:g} s for the end of the {culprit}", culprit, seconds)
            time.sleep(POLL_SECONDS)
    finally:
        os.close(descriptor)


def hold_as_process(run_dir: Path) -> int:
    """Take the shared lock of a process of the run, for as long as the returned descriptor is open."""
    descriptor = _open(run_dir / PROCESSES_FILE)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
