"""The driver's hold on its watchdog: whatever becomes of the driver, nothing of its run stays behind.

Law: the watchdog is started before the run's first process and lives in a session of its own, so neither Ctrl-C nor
a kill of the driver's process group reaches it. It ends the run's processes and removes its temporary directories
when the driver asks (`finish`) or when the driver is gone. Between two looks of the watchdog a process is known by
the token in its environment or the watchdog's pipe alone. One run at a time in one driver process.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from paceline.core.errors import ConfigError, PacelineError
from paceline.runtime import process_tree
from paceline.runtime.process_tree import TEMP_DIR_PREFIX, TOKEN_VARIABLE, ProcessTree

START_SECONDS = 10.0  # a watchdog stands within 0.1 s; a machine that swaps may need more
ANSWER_SECONDS = 2.0  # beyond the sweep's own deadline: removing directories and answering
EXIT_SECONDS = 10.0  # the deadline of a guard that is used as a context manager


class LeftProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process of the run that outlived the deadline. Example: `LeftProcess(pid=4242, name="raylet")`."""

    pid: int
    name: str


class GuardReport(msgspec.Struct, frozen=True):
    """What `finish` found. Example: `GuardReport(killed=9, left=(), directories_left=())`, the clean end.

    `killed` counts processes that the guard ended (those that had ended by themselves are not in it).
    """

    killed: int
    left: tuple[LeftProcess, ...]
    directories_left: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if neither a process nor a directory of the run is left."""
        return not self.left and not self.directories_left


class _Watching(msgspec.Struct, frozen=True):
    """The watchdog's first line."""

    watching: int


class ProcessGuard:
    """Ends all processes that this process starts from now on, by request or after its death.

    States: watching -> finished. Processes that descend from the driver already when the guard starts are spared,
    with all that they start. Losing the last reference to a guard without `finish` ends the run too.
    """

    def __init__(self, watchdog: subprocess.Popen[bytes], tree: ProcessTree, temp_dirs: Sequence[str]) -> None:
        """Use `start` instead: it makes the arguments."""
        self._watchdog = watchdog
        self._tree = tree
        self._temp_dirs = tuple(temp_dirs)
        self._report: GuardReport | None = None

    @classmethod
    def start(cls, temp_dirs: Sequence[Path]) -> Self:
        """Start the watchdog and return once it watches; to be called before the run starts any process.

        Puts PACELINE_RUN_TOKEN into the environment, for the children to inherit. `temp_dirs` (existing or not yet) are
        removed at the end.

        Raises:
            ConfigError: a directory is not `paceline-*` directly below the system's temporary directory or /dev/shm,
                or is a link, or another user's.
            PacelineError: the watchdog does not come up.
        """
        directories = [str(directory.absolute()) for directory in temp_dirs]
        for directory in directories:
            if not process_tree.is_run_directory(directory):
                raise ConfigError(
                    f"{directory} cannot be a temporary directory of the run: it has to be called {TEMP_DIR_PREFIX}* "
                    f"directly below {' or '.join(sorted(process_tree.temp_roots()))} and belong to this user"
                )
        token = secrets.token_hex(16)
        tree = ProcessTree(os.getpid(), token)
        program = [sys.executable, "-I", "-S", process_tree.__file__, str(os.getpid()), token, *directories]
        watchdog = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        tree.spare(watchdog.pid)
        line = _read_line(watchdog, START_SECONDS)
        if not line:
            _close(watchdog)
            raise PacelineError(f"the run's watchdog process did not start within {START_SECONDS:g} s")
        msgspec.json.decode(line, type=_Watching)
        os.environ[TOKEN_VARIABLE] = token
        return cls(watchdog, tree, directories)

    def finish(self, deadline_seconds: float) -> GuardReport:
        """End the run's processes, remove its directories and say what is left.

        Blocks, at most 2 s beyond the deadline. The calling process lives on. A second call returns the first report.
        """
        if self._report is None:
            self._report = self._ask(deadline_seconds) or self._sweep_here(deadline_seconds)
            os.environ.pop(TOKEN_VARIABLE, None)
        return self._report

    def __enter__(self) -> Self:
        """Return the guard itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish with the default deadline."""
        self.finish(EXIT_SECONDS)

    def _ask(self, deadline_seconds: float) -> GuardReport | None:
        """Let the watchdog do it, since it remembers orphans; None if it does not answer."""
        assert self._watchdog.stdin is not None
        try:
            os.write(self._watchdog.stdin.fileno(), b"%.3f\n" % deadline_seconds)
        except BrokenPipeError:
            line = b""
        else:
            line = _read_line(self._watchdog, deadline_seconds + ANSWER_SECONDS)
        _close(self._watchdog)
        return msgspec.json.decode(line, type=GuardReport) if line else None

    def _sweep_here(self, deadline_seconds: float) -> GuardReport:
        """Do the watchdog's work in this process: somebody has ended or stopped the watchdog."""
        result = self._tree.sweep(time.monotonic() + deadline_seconds)
        return GuardReport(
            killed=result.killed,
            left=tuple(LeftProcess(pid, name) for pid, name in result.left),
            directories_left=tuple(process_tree.remove_directories(self._temp_dirs)),
        )


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Read one whole line of the process's output; empty if it ends or the time passes first."""
    assert process.stdout is not None
    descriptor, deadline, line = process.stdout.fileno(), time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(descriptor, 65536) if readable else b""
        if not chunk:
            return b""
        line += chunk
    return line


def _close(process: subprocess.Popen[bytes]) -> None:
    """End the watchdog, which has nothing left to do, and reap it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
