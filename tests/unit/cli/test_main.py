"""How the end of a command becomes an exit code and one line."""

from __future__ import annotations

import signal

import pytest

from paceline.cli import main as front_door
from paceline.cli import train_command
from paceline.core.errors import CapacityError, ConfigError, DeadlineExceeded, PacelineError, RunInterrupted, WorkerDied


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("unknown key a"), 2, "unknown key a"),
        (CapacityError("3 arenas need 9 bytes"), 2, "3 arenas need 9 bytes"),
        (WorkerDied("replica-1 is gone", "replica-1"), 1, "replica-1 is gone"),
        (DeadlineExceeded("no answer\nfor 3 s", "trainer", 3.0), 1, "no answer for 3 s"),
        (PacelineError("something"), 1, "something"),
        (RunInterrupted("stopped by SIGINT", int(signal.SIGINT)), 130, "stopped by SIGINT"),
        (RunInterrupted("stopped by SIGTERM", int(signal.SIGTERM)), 143, "stopped by SIGTERM"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: PacelineError, code: int, line: str
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(train_command, "train", fail)
    assert front_door.main(["train"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == f"paceline: error: {line}"


def test_an_interrupt_before_the_run_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "train", fail)
    assert front_door.main(["train"]) == 130


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(train_command, "train", fail)
    with pytest.raises(ZeroDivisionError):
        front_door.main(["train"])


def test_arguments_reach_the_command_and_its_code_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def take(*arguments: object) -> int:
        seen.extend(arguments)
        return 7

    monkeypatch.setattr(train_command, "train", take)
    assert front_door.main(["train", "-c", "a.yaml", "x=1", "y=2"]) == 7
    file, overrides, command_wall = seen
    assert str(file) == "a.yaml"
    assert overrides == ["x=1", "y=2"]
    assert isinstance(command_wall, float)
