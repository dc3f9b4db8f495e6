"""One `paceline train` as a process of its own, seen from outside.

What belongs to the run is known by a mark in the environment of its first process, which all that it starts inherits;
paceline's own token plays no part in it. Temporary files of the run can only lie below a directory of the test.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MARK = "PACELINE_TEST_MARK"
ENTRY = "from paceline.cli.main import entry_point; entry_point()"
PROGRAM = [sys.executable, "-c", ENTRY]
# The terminal on descriptor 0 becomes the one whose Ctrl-C reaches the process.
PROGRAM_ON_TERMINAL = [
    sys.executable,
    "-c",
    f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {ENTRY}",
]
# Ten updates over five syncs and two validations; the smallest run that has everything in it.
SHORT = ["rollout.total_rollout_steps=640", "data.val_size=200", "actor.optim.lr=6e-4"]
# Long enough to be still training whenever a test has done with it.
ENDLESS = ["rollout.total_rollout_steps=1000000", "data.val_size=100", "trainer.test_freq=0"]
START_SECONDS = 180.0  # a machine that does four other things at the same time
STOP_SECONDS = 20.0  # ten are allowed; the rest is for such a machine
DEATH_SECONDS = 30.0  # fifteen are allowed

Event = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """How the process ended."""

    code: int
    out: str
    err: str


class TrainProcess:
    """A started `paceline train`, its run directory below `directory`."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, temporary: Path, mark: str) -> None:
        self.process = process
        self.directory = directory
        self.temporary = temporary
        self._mark = mark
        self._shared_memory = set(Path("/dev/shm").iterdir())

    def summary(self) -> Any:
        """What the run has written into `summary.json`."""
        return json.loads(read_text(self.run_dir / "summary.json"))

    @property
    def run_dir(self) -> Path:
        """The one run directory; waited for."""
        if not (found := self._run_directories()):
            found = self.until(self._run_directories, "a run directory")
        assert len(found) == 1, found
        return found[0]

    def _run_directories(self) -> list[Path]:
        return [file.parent for file in self.directory.glob("runs/*/*/*/config.yaml")]

    def events(self, kind: str) -> list[Event]:
        """Events of one kind that are in the log by now."""
        return [event for event in read_lines(self.run_dir / "events.jsonl") if event["kind"] == kind]

    def until(self, look: Callable[[], T], what: str, seconds: float = START_SECONDS) -> T:
        """The first true value of `look`; the process must not end before."""
        deadline = time.monotonic() + seconds
        while not (value := look()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s: {self.output()}"
            time.sleep(0.05)
        return value

    def until_trained(self, steps: int = 2) -> None:
        """Wait until so many updates are done."""
        self.until(lambda: len(self.events("train.step")) >= steps, f"{steps} updates")

    def until_started(self, role: str) -> int:
        """Wait for the process of a role; its pid."""
        started = self.until(
            lambda: [e for e in self.events("process.started") if e["role"] == role], f"the start of {role}"
        )
        return int(started[0]["pid"])

    def end(self, seconds: float) -> Ended:
        """Wait for the end."""
        code = self.process.wait(timeout=seconds)
        out, err = self.output()
        return Ended(code, out, err)

    def output(self) -> tuple[str, str]:
        """Standard output and standard error up to now."""
        return read_text(self.directory / "out"), read_text(self.directory / "err")

    def processes(self) -> dict[int, str]:
        """Every living process of the run, with its command line."""
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() not in (entry / "environ").read_bytes():
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            except OSError:
                continue  # it ended while we looked, or is another user's
            if state not in ("Z", "X"):
                found[int(entry.name)] = command.strip()
        return found

    def assert_nothing_is_left(self, seconds: float = DEATH_SECONDS) -> None:
        """No process, no temporary file, no shared memory."""
        deadline = time.monotonic() + seconds
        while left := self._left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        files = [str(path) for path in self.temporary.iterdir()]
        memory = [str(path) for path in set(Path("/dev/shm").iterdir()) - self._shared_memory]
        return processes + files + not_mapped(memory)

    def destroy(self) -> None:
        """End whatever a failed test has left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(timeout=60)


def not_mapped(paths: list[str]) -> list[str]:
    """Those that no living process uses: what one that ended has left, not what other programs work with."""
    used = ""
    for entry in Path("/proc").glob("[0-9]*") if paths else []:
        try:
            used += (entry / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return [path for path in paths if path not in used and Path(path).exists()]


def read_lines(path: Path) -> list[Event]:
    """Whole lines of a JSON-lines file; none of one that does not exist yet."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_text(path: Path) -> str:
    """UTF-8 text with its line ends as they are."""
    return path.read_bytes().decode()


@contextmanager
def train(
    directory: Path,
    overrides: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    terminal: int | None = None,
    module: str | None = None,
) -> Iterator[TrainProcess]:
    """Start `paceline train` in `directory`, in a process group of its own; `terminal` is its descriptor 0, 1 and 2.
    `module` is run in its place.
    """
    mark = f"{MARK}={secrets.token_hex(16)}"
    # Short, since the paths of sockets may have 107 bytes only.
    temporary = Path(tempfile.mkdtemp(prefix="p-", dir="/tmp"))
    program = [*(PROGRAM if terminal is None else PROGRAM_ON_TERMINAL), "train"]
    if module is not None:
        program = [sys.executable, "-m", module]
    environ = {**os.environ, "TMPDIR": str(temporary), **(environment or {}), MARK: mark.partition("=")[2]}
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        process = subprocess.Popen(
            [*program, *overrides],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=out if terminal is None else terminal,
            stderr=err if terminal is None else terminal,
            start_new_session=True,
        )
    run = TrainProcess(process, directory, temporary, mark)
    try:
        yield run
    finally:
        run.destroy()
        shutil.rmtree(temporary, ignore_errors=True)


def has_escape_codes(text: str) -> bool:
    """Whether a terminal would take some of it as commands."""
    return re.search(r"[\x1b\r\x07\x08]", text) is not None
