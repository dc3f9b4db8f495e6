"""The pieces of the live display, each a picture of one part of `Progress`. Pure: no clock, no terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.events import SyncCompleted
from paceline.observability.figures import (
    bytes_text,
    clock_text,
    count_text,
    decimal_text,
    ratio_text,
    reduction_text,
    seconds_text,
    share_text,
    sparkline,
    version_text,
)
from paceline.observability.progress import Progress, ReplicaProgress

LABEL = "dim"
ACCENT = "cyan"
GOOD = "green"
WAITING = "yellow"
BAD = "red"
BORDER = "dim"
EMPTY = "grey23"

STATE_STYLES = {"ready": GOOD, "staged": ACCENT, "fenced": BAD, "starting": LABEL, "joining": WAITING}


def header(progress: Progress, now: float) -> RenderableType:
    """Title line and the bar of updates, or how long the start has taken."""
    title = Text.assemble(("paceline", f"bold {ACCENT}"), "  ", (progress.run.run_id if progress.run else "", LABEL))
    remaining = progress.remaining_seconds()
    clock = Text.assemble((clock_text(progress.elapsed_seconds(now)), "bold"), (" elapsed", LABEL))
    if remaining is not None:
        clock.append(f"  {clock_text(remaining)}", style="bold")
        clock.append(" left", style=LABEL)
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    top.add_column(justify="right", no_wrap=True)
    top.add_row(title, clock)
    return Group(top, _step_line(progress))


def learning(progress: Progress, width: int) -> Panel:
    """Validation accuracy, reward, response length, version, and what became of samples. `width` is the panel's."""
    rows = _rows("validation")
    room = width - len("validation") - 6
    rows.add_row("validation", _validation(progress))
    rows.add_row("", _validation_curve(progress, room))
    reward = sparkline(progress.rewards, min(60, room - 7))
    rows.add_row("reward", Text.assemble((decimal_text(progress.reward, 3), "bold"), "  ", (reward, ACCENT)))
    rows.add_row("response", _pairs([(decimal_text(progress.response_length, 1), "tokens")]))
    rows.add_row("version", _version(progress))
    rows.add_row("lost", _lost(progress))
    return _panel("learning", rows)


def pace(progress: Progress, now: float, width: int) -> Panel:
    """How fast samples flow and where they wait. `width` is the panel's."""
    rows = _rows("rollouter idle")
    bar = max(4, min(24, width - len("rollouter idle") - 20))
    rows.add_row("generation", _pairs([(count_text(progress.tokens_per_second(now)), "tokens/s")]))
    lag_max = "-" if progress.lag_max is None else str(progress.lag_max)
    rows.add_row("version lag", _pairs([("mean", decimal_text(progress.lag_mean, 2)), ("max", lag_max)]))
    queue, admission = progress.queue, progress.admission
    rows.add_row("queue", _level(queue.size, queue.capacity, bar) if queue else Text("-"))
    rows.add_row("admission", _level(admission.used, admission.allowed, bar) if admission else Text("-"))
    rows.add_row("trainer idle", _share(progress.trainer_idle_ratio, bar))
    rows.add_row("rollouter idle", _share(progress.rollouter_idle_ratio, bar))
    return _panel("pace", rows)


def weights(progress: Progress, now: float) -> Panel:
    """The last sync and what each replica serves and does."""
    names = sorted(progress.replicas)
    longest = max((len(name) for name in names), default=0)
    replicas = (_replica(name.ljust(longest), progress.replicas[name], now) for name in names)
    return _panel("weights", Group(_last_sync(progress), *_comparison(progress.sync), *replicas))


def startup(progress: Progress, now: float) -> Panel:
    """Before the first update: which processes are ready, and what the run is doing."""
    roles = [role for role in (progress.run.threads if progress.run else {}) if role != "driver"]
    roles += [role for role in progress.processes if role not in roles]
    rows = _rows(max((*roles, "now"), key=len))
    for role in roles:
        process = progress.processes.get(role)
        if process is None:
            rows.add_row(role, Text("starting", style=WAITING))
        else:
            rows.add_row(role, _pairs([("ready in", seconds_text(process.seconds)), *_threads_of(process.threads)]))
    rows.add_row("now", Text(_doing(progress), style="bold"))
    return _panel("start-up", rows)


def shown_sample(progress: Progress) -> Panel | None:
    """One response with its reward."""
    shown = progress.shown
    if shown is None:
        return None
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    text = Text.assemble((_one_line(shown.prompt), LABEL), " ", (_one_line(shown.response), "bold"))
    style = GOOD if shown.reward > 0 else WAITING
    verdict = Text.assemble(("reward ", LABEL), (f"{shown.reward:.2f}", style), ("  version ", LABEL))
    verdict.append(version_text(shown.version))
    grid.add_row(text, verdict)
    return _panel("a sample", grid)


def notices(progress: Progress, now: float) -> RenderableType | None:
    """Who waits for what since when, and the last trouble; None when there is nothing to say."""
    lines: list[Text] = []
    for (who, what), since in sorted(progress.waits.items(), key=lambda wait: wait[1]):
        line = Text.assemble((f" {who}", f"bold {WAITING}"), (f" waits for {what}, ", WAITING))
        lines.append(line.append(seconds_text(max(0.0, now - since)), style=f"bold {WAITING}"))
    if progress.trouble:
        lines.append(Text(f" {_one_line(progress.trouble)}", style=BAD))
    if progress.finished and progress.finished.outcome != "completed":
        error = f": {_one_line(progress.finished.error)}" if progress.finished.error else ""
        lines.append(Text(f" {progress.finished.outcome}{error}", style=f"bold {BAD}"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines) if lines else None


def processes(progress: Progress) -> Text:
    """Processes and compute threads of the run, on one line."""
    run = progress.run
    if run is None:
        return Text("")
    busy = [f"{role} {threads}" for role, threads in run.threads.items() if threads]
    threads = f"{sum(run.threads.values())} threads on {run.cores} cores"
    text = f" {len(progress.processes)} processes, {threads}: {', '.join(busy)}"
    return Text(text, style=LABEL, no_wrap=True, overflow="ellipsis")


# ---- parts ----------------------------------------------------------------------------------------------------------


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style=BORDER, box=box.ROUNDED, padding=(0, 1))


def _rows(longest_label: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=LABEL, no_wrap=True, min_width=len(longest_label))
    table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    """Words in a row: digits stand out, the rest is quiet."""
    text = Text()
    for index, word in enumerate(word for pair in pairs for word in pair):
        gap = "" if index == 0 else "  " if index % 2 == 0 else " "
        text.append(gap + word, style="bold" if word[:1].isdigit() else LABEL)
    return text


def _step_line(progress: Progress) -> RenderableType:
    if not progress.steps:
        return Text("starting", style=WAITING)
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    done, total = progress.step, max(progress.total_steps, progress.step)
    label = Text.assemble(("step ", LABEL), (str(done), "bold"), (f"/{total}", LABEL))
    bar = ProgressBar(total=total, completed=done, style=EMPTY, complete_style=ACCENT, finished_style=GOOD)
    grid.add_row(label, bar, Text(f"{100 * done // total} %", style="bold"))
    return grid


def _validation(progress: Progress) -> Text:
    curve = progress.validation_curve
    if not curve:
        return Text("-", style=LABEL)
    (_, first), (version, last) = curve[0], curve[-1]
    style = f"bold {GOOD}" if last > first else "bold"
    now = (decimal_text(last, 3), style)
    before = [(f"{decimal_text(first, 3)} \u2192 ", LABEL)] if len(curve) > 1 else []
    return Text.assemble(*before, now, ("  at ", LABEL), version_text(version))


def _validation_curve(progress: Progress, room: int) -> Text:
    measuring = _validating(progress)
    curve = [accuracy for _, accuracy in progress.validation_curve]
    # One measurement is no course yet.
    course = sparkline(curve, room - len(measuring) - 2) if len(curve) > 1 else ""
    return Text.assemble((course, GOOD), "  " if course else "", (measuring, LABEL))


def _validating(progress: Progress) -> str:
    run = progress.validating
    return f"measuring {version_text(run.version)}" if run else ""


def _version(progress: Progress) -> Text:
    text = Text.assemble((version_text(progress.version), "bold"))
    if progress.captured is not None and progress.captured != progress.version:
        text.append("  captured ", style=LABEL).append(version_text(progress.captured))
    return text


def _lost(progress: Progress) -> Text:
    parts = [f"{count} dropped ({reason})" for reason, count in sorted(progress.dropped.items())]
    parts += [f"{progress.failed} failed"] if progress.failed else []
    return Text(", ".join(parts), style=WAITING) if parts else Text("no samples", style=LABEL)


def _level(size: int, capacity: int, width: int) -> Text:
    text = _bar(size / capacity if capacity > 0 else 0.0, width)
    return text.append(f"  {size:,}", style="bold").append(f" of {capacity:,}", style=LABEL)


def _share(ratio: float | None, width: int) -> Text:
    return Text("-") if ratio is None else _bar(ratio, width).append(f"  {ratio_text(ratio)}", style="bold")


def _bar(ratio: float, width: int) -> Text:
    filled = round(width * min(1.0, max(0.0, ratio)))
    return Text.assemble(("\u2501" * filled, ACCENT), ("\u2501" * (width - filled), EMPTY))


def _last_sync(progress: Progress) -> Text:
    sync = progress.sync
    if sync is None:
        return Text("no version published yet", style=LABEL)
    pause = max(sync.pauses.values(), default=None)
    text = _pairs([("last sync", version_text(sync.version)), (sync.mode, bytes_text(sync.bytes))])
    text.append_text(_pairs([(" in", seconds_text(sync.seconds)), ("pause", seconds_text(pause))]))
    text.append("  verified" if sync.verified else "  not verified", style=GOOD if sync.verified else WAITING)
    text.append(f"  {progress.syncs_verified} of {progress.syncs}", style=LABEL)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _comparison(sync: SyncCompleted | None) -> list[Text]:
    """What came of comparing the version with its base; nothing where nobody compared."""
    if sync is None or sync.changed_share is None:
        return []
    text = _pairs([("changed", share_text(sync.changed_share)), ("compared in", seconds_text(sync.encode_seconds))])
    if sync.mode == "delta" and sync.base_version is not None:
        text.append_text(_pairs([(" against", version_text(sync.base_version))]))
        text.append(f"  {reduction_text(sync.full_bytes, sync.bytes)}", style="bold")
        text.append(" fewer bytes", style=LABEL)
    text.no_wrap, text.overflow = True, "ellipsis"
    return [text]


def _replica(name: str, replica: ReplicaProgress, now: float) -> Text:
    line = Text.assemble((f"{name}  ", LABEL), no_wrap=True, overflow="ellipsis")
    line.append(f"{replica.state:<8}  ", style=STATE_STYLES.get(replica.state, ""))
    line.append(f"{version_text(replica.version):<6}", style="bold")
    figures = [
        (replica.tokens_per_second(now), 8, "tokens/s"),
        (replica.running, 6, "running"),
        (replica.waiting, 6, "waiting"),
    ]
    for figure, width, unit in figures:
        line.append(f"{count_text(figure):>{width}}", style="bold").append(f" {unit}", style=LABEL)
    return line


def _threads_of(threads: int) -> list[tuple[str, str]]:
    return [(str(threads), "thread" if threads == 1 else "threads")] if threads else []


def _doing(progress: Progress) -> str:
    run, missing = progress.run, progress.missing_processes()
    if run is None:
        return "checking the configuration"
    if missing:
        return f"waiting for {', '.join(missing)}"
    if progress.validating:
        problems = count_text(progress.validating.problems)
        return f"{_validating(progress)} on {problems} validation problems"
    if progress.sync is None:
        return "publishing the first weights"
    return "waiting for the first samples"


def _one_line(text: str) -> str:
    return " ".join(text.split())
