"""Real process trees: what a run leaves behind is ended after a request, a kill, or the death of the watchdog."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.runtime.process_guard import ProcessGuard
from paceline.runtime.process_tree import (
    TEMP_DIR_PREFIX,
    TOKEN_VARIABLE,
    ProcessIdentity,
    ProcessTree,
    read_row,
    remove_directories,
    send,
)

DEADLINE_SECONDS = 60.0
REST_SECONDS = 0.02  # longer than anything makes the watchdog wait while it looks

# Says its pid and sleeps. `env -i` cases take the token away, so only the memory of the watchdog knows them.
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
# A child with a child of its own.
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-ISc', {SLEEPER!r}]); " + SLEEPER
# Double fork and a session of its own: the parent is init, and those between are gone when it says its pid.
DETACHED = (
    """
import os, time
def leave_parent():
    parent = os.getpid()
    if os.fork(): os._exit(0)
    while os.getppid() == parent: time.sleep(0.001)
leave_parent()
os.setsid()
leave_parent()
"""
    + SLEEPER
)
# Bears a name that looks like the fields of /proc/PID/stat.
RENAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'x) Z 1 (y', 0, 0, 0); " + SLEEPER
# Starts detached sleepers for as long as it lives.
BREEDER = (
    "import subprocess, sys, time\n"
    f"while True: subprocess.Popen([sys.executable, '-ISc', {SLEEPER!r}], start_new_session=True); time.sleep(0.05)"
)

# A driver that obeys one JSON line at a time and answers each with one.
DRIVER = """
import json, os, subprocess, sys, time
from pathlib import Path
from paceline.runtime import process_guard
from paceline.runtime.process_guard import ProcessGuard

def run(program, clear=False):
    command = [sys.executable, "-ISc", program]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={} if clear else None)
    children.append(child)
    return int(child.stdout.readline())

children, guard = [], None
for line in sys.stdin:
    order, *arguments = json.loads(line)
    if order == "start":
        guard = ProcessGuard.start([Path(argument) for argument in arguments])
        answer = guard._watchdog.pid
    elif order == "run":
        answer = run(*arguments)
    elif order == "fork":
        answer = os.fork()
        if not answer:
            time.sleep(600)
            os._exit(0)
    elif order == "wait for the watchdog":
        process_guard.ANSWER_SECONDS = arguments[0] - arguments[1]
        answer = order
    elif order == "finish":
        report = guard.finish(*arguments)
        answer = [report.killed, report.clean]
    else:
        answer = order
    print(json.dumps(answer), flush=True)
"""


class Driver:
    """A process with a guard, and the processes that it was told to start."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parents[3],
        )

    def ask(self, *order: object) -> object:
        """Give one order and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def pid(self, *order: object) -> int:
        """Give an order that is answered by a pid."""
        answer = self.ask(*order)
        assert isinstance(answer, int)
        return answer

    def finish(self) -> tuple[int, bool]:
        """Return how many were killed, and whether nothing is left."""
        answer = self.ask("finish", DEADLINE_SECONDS)
        assert isinstance(answer, list)
        return answer[0], answer[1]

    def wait_until_remembered(self, watchdog: int) -> None:
        """Wait for two whole looks of the watchdog: it reads much, and rests before and after."""
        rests: set[int] = set()

        def has_looked_twice() -> bool:
            if (reads := reads_at_rest(watchdog)) is not None:
                rests.add(reads)
            return len(rests) > 2

        wait_for(has_looked_twice, "two looks")


@pytest.fixture
def driver() -> Iterator[Driver]:
    with_guard = Driver()
    yield with_guard
    end(with_guard.process)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-ISc", SLEEPER], stdout=subprocess.PIPE)
    yield process
    end(process)


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX))
    (path / "sockets").mkdir()
    (path / "sockets" / "raylet").write_bytes(b"x")
    yield path
    remove_directories([str(path)])


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def runs(pid: int) -> bool:
    row = read_row(pid)
    return row is not None and row.running


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {DEADLINE_SECONDS} s"
        time.sleep(0.05)


def reads_at_rest(pid: int) -> int | None:
    """Its read calls so far; None while it does something."""
    before = read_calls(pid)
    time.sleep(REST_SECONDS)
    sleeps = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"
    return before if sleeps and read_calls(pid) == before else None


def read_calls(pid: int) -> int:
    return int(re.findall(r"syscr: (\d+)", Path(f"/proc/{pid}/io").read_text(encoding="ascii"))[0])


def wait_gone(*pids: int) -> None:
    wait_for(lambda: not any(runs(pid) for pid in pids), f"end of {[pid for pid in pids if runs(pid)]}")


def grow_tree(driver: Driver) -> list[int]:
    """Start one of each kind and return the pids that are known."""
    pids = [driver.pid("run", program) for program in (SLEEPER, PARENT, DETACHED)]
    return [*pids, driver.pid("run", RENAMED, True)]


def test_finish_ends_the_run_and_nothing_else(
    driver: Driver, bystander: subprocess.Popen[bytes], temp_dir: Path
) -> None:
    older = driver.pid("run", SLEEPER)
    watchdog = driver.pid("start", str(temp_dir))
    pids = grow_tree(driver)
    killed, clean = driver.finish()
    assert clean is True
    assert killed == len(pids) + 1  # one more: the child of PARENT does not tell its pid to the test
    assert not any(runs(pid) for pid in pids)
    assert not temp_dir.exists()
    assert not runs(watchdog)
    assert driver.ask("still there") == "still there"
    assert runs(older), "a process that was there before the guard belongs to somebody else"
    assert runs(bystander.pid)
    os.kill(older, signal.SIGKILL)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["driver", "process group"])
def test_a_killed_driver_leaves_nothing(
    driver: Driver, bystander: subprocess.Popen[bytes], temp_dir: Path, kill: Callable[[int, int], None]
) -> None:
    watchdog = driver.pid("start", str(temp_dir))
    pids = grow_tree(driver)
    driver.wait_until_remembered(watchdog)
    kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    wait_gone(*pids, watchdog)
    assert not temp_dir.exists()
    assert runs(bystander.pid)


def test_a_driver_that_simply_exits_leaves_nothing(driver: Driver) -> None:
    watchdog = driver.pid("start")
    pids = grow_tree(driver)
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    wait_gone(*pids, watchdog)
    assert driver.process.wait() == 0


def test_a_forked_child_that_holds_the_pipe_does_not_hide_the_death(driver: Driver) -> None:
    watchdog = driver.pid("start")
    forked = driver.pid("fork")
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    wait_gone(forked, watchdog)


def test_the_watchdog_outlives_the_signals_that_stop_a_driver(driver: Driver) -> None:
    watchdog = driver.pid("start")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watchdog, number)
    child = driver.pid("run", SLEEPER)
    driver.wait_until_remembered(watchdog)
    assert runs(watchdog)
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    wait_gone(child, watchdog)


def test_finish_does_without_a_killed_watchdog(driver: Driver, temp_dir: Path) -> None:
    watchdog = driver.pid("start", str(temp_dir))
    child = driver.pid("run", PARENT)
    os.kill(watchdog, signal.SIGKILL)
    wait_gone(watchdog)
    assert driver.finish() == (2, True)
    assert not runs(child)
    assert not temp_dir.exists()


def test_finish_does_without_a_stopped_watchdog(driver: Driver) -> None:
    watchdog = driver.pid("start")
    child = driver.pid("run", SLEEPER)
    os.kill(watchdog, signal.SIGSTOP)
    driver.ask("wait for the watchdog", 0.5, DEADLINE_SECONDS)
    assert driver.finish() == (1, True)
    assert not runs(child)
    assert not runs(watchdog)


def test_two_runs_do_not_touch_each_other(driver: Driver) -> None:
    other = Driver()
    try:
        driver.pid("start")
        other_watchdog = other.pid("start")
        mine, theirs = driver.pid("run", SLEEPER), other.pid("run", SLEEPER)
        assert driver.finish() == (1, True)
        assert not runs(mine)
        assert runs(theirs)
        assert runs(other_watchdog)
        assert other.finish() == (1, True)
        assert not runs(theirs)
    finally:
        end(other.process)


def test_a_run_ends_with_what_it_breeds_meanwhile(driver: Driver) -> None:
    driver.pid("start")
    breeder = driver.pid("run", "import os; print(os.getpid(), flush=True)\n" + BREEDER)
    killed, clean = driver.finish()
    assert clean is True
    assert killed >= 1
    assert not runs(breeder)
    assert driver.ask("still there") == "still there"


def test_the_guard_as_context_manager_ends_what_was_started_inside(temp_dir: Path) -> None:
    with ProcessGuard.start([temp_dir]) as guard:
        inside = subprocess.Popen([sys.executable, "-ISc", SLEEPER], stdout=subprocess.PIPE)
        assert TOKEN_VARIABLE in os.environ
    assert inside.wait() == -signal.SIGKILL
    end(inside)
    assert guard.finish(DEADLINE_SECONDS).killed == 1, "a second call returns the first report"
    assert not temp_dir.exists()
    assert TOKEN_VARIABLE not in os.environ


def test_the_token_finds_an_orphan_that_no_look_has_seen(bystander: subprocess.Popen[bytes]) -> None:
    command = [sys.executable, "-ISc", SLEEPER]
    marked = subprocess.Popen(command, stdout=subprocess.PIPE, env={TOKEN_VARIABLE: "mine"})
    other = subprocess.Popen(command, stdout=subprocess.PIPE, env={TOKEN_VARIABLE: "mine-not"})
    try:
        for process in (marked, other):
            assert process.stdout is not None
            process.stdout.readline()
        result = ProcessTree(bystander.pid, "mine").sweep(time.monotonic() + DEADLINE_SECONDS)
        assert result == (1, [])
        assert marked.wait() == -signal.SIGKILL
        assert other.poll() is None
        assert bystander.poll() is None, "the root itself is never ended"
    finally:
        end(marked)
        end(other)


def test_a_pid_given_out_again_is_not_signalled(bystander: subprocess.Popen[bytes]) -> None:
    row = read_row(bystander.pid)
    assert row is not None
    send(ProcessIdentity(bystander.pid, row.identity.start_ticks - 1), signal.SIGKILL)
    send(row.identity, signal.SIGSTOP)
    assert bystander.poll() is None
    send(row.identity, signal.SIGKILL)
    assert bystander.wait() == -signal.SIGKILL


def test_a_misleading_process_name_is_read_whole() -> None:
    process = subprocess.Popen([sys.executable, "-ISc", RENAMED], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        row = read_row(process.pid)
        assert row is not None
        assert (row.name, row.parent_pid, row.running) == ("x) Z 1 (y", os.getpid(), True)
    finally:
        end(process)


def test_only_directories_of_a_run_are_accepted(tmp_path: Path, temp_dir: Path) -> None:
    link = temp_dir.with_name(temp_dir.name + "-link")
    link.symlink_to(tmp_path)
    try:
        refused = [tmp_path, temp_dir / "sockets", Path(tempfile.gettempdir()), Path.home(), link, temp_dir / ".."]
        for path in refused:
            with pytest.raises(ConfigError, match="cannot be a temporary directory"):
                ProcessGuard.start([path])
        assert remove_directories([str(link)]) == [str(link)]
        assert tmp_path.exists()
    finally:
        link.unlink()
