"""The live display: key facts at every width and height, in every phase; the terminal as it is given back."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from paceline.core.events import AnyEvent, RunFinished, SampleDropped, SampleShown, SyncAborted, WaitBegan
from paceline.observability.console import ConsoleDisplay, ProgressView
from paceline.observability.display import open_display
from paceline.observability.plain_lines import PlainLines
from paceline.observability.progress import Progress
from paceline.observability.summary import fold_summary
from paceline.observability.summary_table import summary_table
from scripts.render_display import progress_at, render_svg
from tests.unit.observability.made_run import T0, records, startup, training, version, whole_run

WIDTHS = (60, 72, 79, 80, 100, 120, 160)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and how it encodes."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def draw(progress: Progress, width: int, height: int = 60, now: float | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
    view = ProgressView(progress, progress.now if now is None else now)
    lines = console.render_lines(view, console.options, pad=False)
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def progress_of(*timed: tuple[float, str, AnyEvent]) -> Progress:
    progress = Progress()
    progress.feed_all(records(*timed))
    return progress


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_in_the_middle_shows_every_figure(width: int) -> None:
    text = draw(progress_of(*startup(), *training(4)), width)
    facts = [
        "arithmetic-001",
        "step 4/8",
        "50 %",
        "0:19 elapsed",
        "0:08 left",
        "0.410 → 0.610",
        "at 1.2",
        "reward      0.250",
        "4.0 tokens",
        "version     1.2",
        "9,000 tokens/s",
        "mean 0.25  max 1",
        "2 of 8",
        "3 of 6",
        "25 %",
        "20 %",
        "full 3.9 MB in 200 ms",
        "pause 3.0 ms",
        "replica-0  ready",
        "replica-1  ready",
        "47+85= 132",
        "reward 1.00",
    ]
    missing = [fact for fact in facts if fact not in text]
    assert not missing, text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_before_the_first_record_and_while_starting(width: int) -> None:
    assert "checking the configuration" in draw(Progress(), width)
    text = draw(progress_of(*list(startup())[:3]), width)
    assert "starting" in text
    assert "ready in 3.0 s  1 thread" in text
    assert "waiting for replica-1, rollouter" in text
    assert "publishing the first weights" in draw(progress_of(*startup()), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_who_waits_for_what_since_when_and_what_went_wrong(width: int) -> None:
    timed = [
        *startup(),
        *training(4),
        (19.0, "rollouter", SampleDropped(ids=["a", "b"], reason="stale")),
        (19.0, "trainer", WaitBegan(who="trainer", what="64 samples", since_wall=T0 + 19)),
        (20.0, "synchronizer", SyncAborted(version=version(3), phase="stage", error="replica-1\nis gone")),
    ]
    text = draw(progress_of(*timed), width, now=T0 + 28)
    assert "trainer waits for 64 samples, 9.0 s" in text
    assert "sync of 1.3 ended in stage: replica-1 is gone" in text
    assert "2 dropped (stale)" in text
    failed = RunFinished(outcome="failed", error="replica-1 is gone", exit_code=1)
    assert "failed: replica-1 is gone" in draw(progress_of(*timed, (29.0, "driver", failed)), width)


@pytest.mark.parametrize("height", [4, 8, 12, 16, 20, 24, 30])
def test_what_does_not_fit_the_height_is_left_out(height: int) -> None:
    wait = WaitBegan(who="trainer", what="64 samples", since_wall=T0 + 19)
    text = draw(progress_of(*startup(), *training(4), (19.0, "trainer", wait)), 80, height)
    assert len(text.splitlines()) < height
    assert "step 4/8" in text
    assert ("trainer waits" in text) or height < 5
    assert ("a sample" in text) == (height >= 20)


def test_text_of_a_sample_is_shown_as_it_is() -> None:
    shown = SampleShown(prompt="[bold]a[/]\nb", response="[red]", reward=0.0, version=version(1))
    assert "[bold]a[/] b [red]" in draw(progress_of(*startup(), *training(2), (15.0, "rollouter", shown)), 80)


def test_a_terminal_gets_the_live_display_and_a_pipe_plain_lines(tmp_path: Path) -> None:
    assert isinstance(open_display(Terminal(), tmp_path, lambda: T0), ConsoleDisplay)
    assert isinstance(open_display(io.StringIO(), tmp_path, lambda: T0), PlainLines)
    # A terminal that cannot draw lines and blocks.
    assert isinstance(open_display(Terminal("ascii"), tmp_path, lambda: T0), PlainLines)


def test_the_terminal_is_given_back_with_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    display = ConsoleDisplay(terminal, tmp_path, lambda: T0 + 30)
    display.start()
    display.feed([])
    display.feed(whole_run())
    display.stop(fold_summary(whole_run()))
    written = terminal.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    end = written[written.rindex("\x1b[?25h") :]
    assert "completed" in end
    assert "17 admitted, 16 trained, 1 dropped (shutdown)" in end
    assert tmp_path.name in end.replace("\n", "")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_summary_table_in_every_state(width: int) -> None:
    def table(summary: dict[str, object]) -> str:
        console = Console(file=io.StringIO(), width=width, color_system=None)
        with console.capture() as capture:
            console.print(summary_table(summary, "runs/a"))
        return " ".join(capture.get().split())

    whole = table(fold_summary(whole_run()))
    assert "0.410 -> 0.810" in whole
    assert "0.80 after 17 s" in whole
    assert "5 of 5 verified, 19.5 MB" in whole
    assert "mean 0.25 (0.38 predicted), p99 1, max 1" in whole
    assert "unfinished" in table(fold_summary([]))
    failed = RunFinished(outcome="failed", error="replica-1\nis gone", exit_code=1)
    assert "failed: replica-1 is gone" in table(fold_summary(records(*startup(), (20.0, "driver", failed))))
    broken = fold_summary([*whole_run(), *records((30.0, "x", SampleDropped(ids=["s1a"], reason="stale")))])
    assert "sample s1a ended twice" in table(broken)


def test_the_picture_for_the_readme_stands_alone() -> None:
    progress = progress_at(whole_run(), 0.5)
    assert progress.step == 5
    assert progress.finished is None
    svg = render_svg(progress, 96)
    assert svg.startswith("<svg")
    assert "step" in svg
    assert "font-face" not in svg
    assert "url(http" not in svg
