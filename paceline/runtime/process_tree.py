"""Find and end every process that descends from one root process; as a program, the watchdog of a run.

Law: a process belongs to the run if the root is its ancestor now, if it was at an earlier look and has the same
(pid, start time) still, if its environment carries the run's token, or if it holds the root's pipe. What descended
from the root before the first look, the root itself and the watchdog are never touched, nor is anything else.

The file is run alone as `python -I -S process_tree.py ROOT_PID TOKEN [DIRECTORY ...]`, so it imports the standard
library only, and little of it: it has to stand before the run starts its first process.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOKEN_VARIABLE = "PACELINE_RUN_TOKEN"
TEMP_DIR_PREFIX = "paceline-"
LOOK_SECONDS = 0.5
LOOK_COST_RATIO = 50.0  # a look may take 2 % of one core at most, however many processes the machine has
ORPHAN_SWEEP_SECONDS = 12.0  # after the driver's death nobody can say a deadline


class ProcessIdentity(NamedTuple):
    """One process for ever: a pid is given out again, a (pid, start time) pair is not."""

    pid: int
    start_ticks: int  # clock ticks since boot, field 22 of /proc/PID/stat


class ProcessRow(NamedTuple):
    """What one look at /proc/PID/stat says."""

    identity: ProcessIdentity
    parent_pid: int
    name: str
    running: bool  # False: a zombie that only waits to be reaped


class SweepResult(NamedTuple):
    """What a sweep did: how many processes it ended, and (pid, name) of those that outlived the deadline."""

    killed: int
    left: list[tuple[int, str]]


def read_file(path: str) -> bytes:
    """Return a file of /proc whole; empty if its process is gone or not ours to see."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        while chunk := os.read(descriptor, 65536):
            content += chunk
    except OSError:  # ended between open and read
        return b""
    finally:
        os.close(descriptor)
    return content


def read_row(pid: int) -> ProcessRow | None:
    """Return the row of a process, or None if there is none (any more)."""
    line = read_file(f"/proc/{pid}/stat")
    name_end = line.rfind(b")")  # the name itself may hold spaces and brackets
    if name_end < 0:
        return None
    fields = line[name_end + 2 :].split()
    name = line[line.find(b"(") + 1 : name_end].decode(errors="replace")
    # A leader that has exited shows as a zombie while its other threads still run.
    running = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return ProcessRow(ProcessIdentity(pid, int(fields[19])), int(fields[1]), name, running)


def read_table() -> dict[int, ProcessRow]:
    """Return all processes that /proc shows, keyed by pid."""
    with os.scandir("/proc") as entries:
        rows = [read_row(int(entry.name)) for entry in entries if entry.name.isdigit()]
    return {row.identity.pid: row for row in rows if row is not None}


def carries(pid: int, marker: bytes) -> bool:
    """Return whether the process was started with `marker` ("NAME=value") in its environment."""
    return marker in read_file(f"/proc/{pid}/environ").split(b"\0")


def holds(pid: int, pipe: str) -> bool:
    """Return whether the process has `pipe` (its link text, "pipe:[inode]") open."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(os.readlink(entry.path) == pipe for entry in entries)  # noqa: PTH115 (pathlib takes long to import)
    except OSError:
        return False


def send(identity: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to exactly this process; do nothing if it is gone or may not be signalled."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        descriptor = -1  # gone, or no pidfd here (old kernel, sandbox): the check below decides
    try:
        row = read_row(identity.pid)
        if row is None or row.identity != identity:
            return
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(identity.pid, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class ProcessTree:
    """The descendants of one root, remembered beyond the death of their parents.

    Orphans are given to init, which hides whose they were; hence `look` has to be called now and then while the root
    lives. Those born and orphaned between two looks are known by the token (after an exec, unless the environment was
    cleared) or by the root's close-on-exec pipe (a fork without exec, whose /proc/PID/environ is the root's own).
    """

    def __init__(self, root_pid: int, token: str, pipe: str | None = None) -> None:
        """Begin to watch; what descends from the root already is spared for good, with all that it will start."""
        row = read_row(root_pid)
        self._root = row.identity if row is not None else ProcessIdentity(root_pid, -1)
        self._marker = f"{TOKEN_VARIABLE}={token}".encode()
        self._pipe = pipe
        self._members: set[ProcessIdentity] = set()
        self._spared: set[ProcessIdentity] = set()
        self.look()
        self._spared, self._members = self._members, set()
        self.spare(os.getpid())

    def spare(self, pid: int) -> None:
        """Never touch this process (if it exists) nor what it starts."""
        row = read_row(pid)
        if row is not None:
            self._spared.add(row.identity)

    def look(self) -> dict[int, ProcessRow]:
        """Remember the living descendants, forget the dead, and return the table that was seen."""
        table = read_table()
        children: dict[int, list[ProcessRow]] = {}
        for row in table.values():
            children.setdefault(row.parent_pid, []).append(row)
        known = {identity for identity in self._members if self._runs(table, identity)}
        pending = list(known)
        if self._root.pid in table and table[self._root.pid].identity == self._root:
            pending.append(self._root)
        while pending:
            for row in children.get(pending.pop().pid, ()):
                if row.identity not in known and row.running and self._may_belong(row.identity):
                    known.add(row.identity)
                    pending.append(row.identity)
        self._members = known
        return table

    def sweep(self, deadline: float) -> SweepResult:
        """End all processes of the tree but its root, until none is left or `time.monotonic()` passes `deadline`.

        Each round stops the processes first and looks again until nothing new shows: a process that is stopped
        cannot start another behind the sweep's back.
        """
        killed: set[ProcessIdentity] = set()
        quiet_looks = 0
        while True:
            table = self._look_everywhere()
            quiet_looks = 0 if self._members else quiet_looks + 1
            if quiet_looks == 2:
                return SweepResult(len(killed), [])
            if time.monotonic() >= deadline:
                left = sorted((identity.pid, table[identity.pid].name) for identity in self._members)
                return SweepResult(len(killed - self._members), left)
            stopped: set[ProcessIdentity] = set()
            while self._members - stopped and time.monotonic() < deadline:
                for identity in self._members - stopped:
                    send(identity, signal.SIGSTOP)
                stopped |= self._members
                self._look_everywhere()
            for identity in stopped | self._members:
                send(identity, signal.SIGKILL)
            killed |= stopped | self._members
            time.sleep(0.03)

    def _look_everywhere(self) -> dict[int, ProcessRow]:
        """Look, and add what the token or the pipe alone gives away."""
        table = self.look()
        for row in table.values():
            if row.identity in self._members or not row.running or not self._may_belong(row.identity):
                continue
            pid = row.identity.pid
            if carries(pid, self._marker) or (self._pipe is not None and holds(pid, self._pipe)):
                self._members.add(row.identity)
        return table

    def _may_belong(self, identity: ProcessIdentity) -> bool:
        return identity != self._root and identity not in self._spared

    @staticmethod
    def _runs(table: dict[int, ProcessRow], identity: ProcessIdentity) -> bool:
        row = table.get(identity.pid)
        return row is not None and row.identity == identity and row.running


def temp_roots() -> set[str]:
    """Return the directories directly below which a run may have temporary directories."""
    return {os.path.realpath(tempfile.gettempdir()), "/dev/shm"}


def is_run_directory(path: str) -> bool:
    """Return whether a path names what may be removed: PREFIX* directly below a temp root, our own, no symlink.

    A path that does not exist (yet) is judged by its name alone.
    """
    parent, name = os.path.split(path)
    if not name.startswith(TEMP_DIR_PREFIX) or os.path.realpath(parent) not in temp_roots():
        return False
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def remove_directories(paths: Iterable[str]) -> list[str]:
    """Remove the run's temporary directories; return those that are still there."""
    for path in paths:
        if is_run_directory(path):
            shutil.rmtree(path, ignore_errors=True)
    return [path for path in paths if os.path.lexists(path)]


def read_request(root_pid: int, timeout: float) -> float | None:
    """Wait for the driver: seconds that it gives for the sweep, or None when `timeout` has passed without news.

    The driver's end is seen as end of file, or, should a process that it forked hold the pipe, as another parent.
    """
    readable, _, _ = select.select([0], [], [], timeout)
    if readable:
        line = os.read(0, 64)
        return float(line) if line else ORPHAN_SWEEP_SECONDS
    return ORPHAN_SWEEP_SECONDS if os.getppid() != root_pid else None


def tell(answer: dict[str, object]) -> None:
    """Write one JSON line for the driver, which may be dead."""
    try:
        os.write(1, json.dumps(answer).encode() + b"\n")
    except OSError:
        return


def watch(root_pid: int, token: str, directories: Sequence[str]) -> None:
    """Follow the driver until it ends or asks for the end, then end and remove what the run has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever stops the run stops the driver; this process comes after it
    tree = ProcessTree(root_pid, token, os.readlink("/proc/self/fd/0"))  # noqa: PTH115 (as above)
    tell({"watching": root_pid})
    seconds, look_cost = None, 0.0
    while seconds is None:
        seconds = read_request(root_pid, max(LOOK_SECONDS, look_cost * LOOK_COST_RATIO))
        began = time.monotonic()
        tree.look()
        look_cost = time.monotonic() - began
    result = tree.sweep(time.monotonic() + seconds)
    tell({"killed": result.killed, "left": result.left, "directories_left": remove_directories(directories)})


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
