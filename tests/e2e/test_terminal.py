"""On a terminal: the live display, a real Ctrl-C, and the terminal given back as it was."""

from __future__ import annotations

import os
import pty
import re
import select
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.train_process import ENDLESS, STOP_SECONDS, train

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """Takes all that is written to a pseudo-terminal."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._chunks: list[bytes] = []
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    def close(self) -> None:
        self._stop.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._stop.is_set():
            if select.select([self._master], [], [], 0.1)[0]:
                self._chunks.append(os.read(self._master, 65536))


@contextmanager
def pseudo_terminal() -> Iterator[tuple[int, int]]:
    """Master and slave of a terminal of 40 lines and 100 columns."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    try:
        yield master, slave
    finally:
        os.close(master)
        os.close(slave)


def test_the_live_display_and_ctrl_c(tmp_path: Path) -> None:
    with pseudo_terminal() as (master, slave):
        before = termios.tcgetattr(slave)
        screen = Screen(master)
        environment = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        try:
            with train(tmp_path, ENDLESS, environment=environment, terminal=slave) as run:
                run.until_trained(20)
                # Drawn twice a second: the figures of an update are on the screen a moment after it.
                run.until(lambda: "val" in screen.text and "queue" in screen.text, "figures on the screen")
                os.write(master, b"\x03")
                assert run.process.wait(timeout=STOP_SECONDS) == 130
                run.assert_nothing_is_left()
                assert run.summary()["outcome"] == "interrupted"
            after = termios.tcgetattr(slave)
        finally:
            screen.close()
    assert after == before
    assert HIDE_CURSOR in screen.text
    assert screen.text.rindex(SHOW_CURSOR) > screen.text.rindex(HIDE_CURSOR)
    tail = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.text)[-2000:]
    assert re.search(r"outcome +interrupted", tail)
    assert "paceline: error: stopped by SIGINT" in tail
    assert "Traceback" not in screen.text
