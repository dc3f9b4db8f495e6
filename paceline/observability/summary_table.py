"""The summary of a run for people: one compact table, the same on a terminal and in a pipe (ASCII only)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observability.figures import bytes_text, count_text, decimal_text, ratio_text, seconds_text

SHOWN_RANGES = 8
MOST_REASONS = 5
OUTCOME_STYLES = {"completed": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


def summary_table(summary: Mapping[str, Any], run_dir: str) -> Table:
    """A table of `fold_summary`'s result; `run_dir` is where the rest is."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    outcome = summary["outcome"] or "unfinished"
    result = Text(outcome, style=OUTCOME_STYLES.get(outcome, "bold yellow"))
    if summary["error"]:
        result.append(f": {' '.join(summary['error'].split())}", style="default")
    table.add_row("outcome", result)
    table.add_row("accuracy", _accuracy(summary))
    table.add_row("training", _training(summary))
    table.add_row("syncs", _syncs(summary["syncs"]))
    if summary["checkpoints"]["saved_count"] or summary["checkpoints"]["failed_count"]:
        table.add_row("checkpoints", _checkpoints(summary["checkpoints"]))
    table.add_row("samples", _samples(summary["samples"]))
    for reason, count in list(summary["failure_reasons"].items())[:MOST_REASONS]:
        table.add_row("  failed", Text(f"{count_text(count)}: {reason}"))
    for reason, count in list(summary["lacking_reasons"].items())[:MOST_REASONS]:
        table.add_row("  went on without", Text(f"{count_text(count)} responses: {reason}"))
    if summary["prompts_refused"]:
        table.add_row("  refused", f"{count_text(summary['prompts_refused'])} prompts, too long or of bad rows")
    for reason, lengths in summary["dropped_response_lengths"].items():
        table.add_row(f"  {reason}", _lengths(lengths))
    if summary["lives"] > 1:
        table.add_row("lives", _lives(summary))
    table.add_row("version lag", _lag(summary["version_lag"]))
    table.add_row("generation", f"{count_text(summary['tokens_generated'])} response tokens")
    trainer, rollouter = (ratio_text(summary[f"{part}_idle_ratio"]) for part in ("trainer", "rollouter"))
    table.add_row("idle", f"trainer {trainer}, rollouter {rollouter}")
    for error in summary["ledger_errors"][:5]:
        table.add_row("ledger", Text(error, style="bold red"))
    if summary["lost_events"]:
        table.add_row("event log", Text(f"{summary['lost_events']} events could not be written", style="bold red"))
    table.add_row("directory", Text(run_dir, style="bold"))
    return table


def _accuracy(summary: Mapping[str, Any]) -> Text:
    if summary["val_accuracy_first"] is None:
        return Text("not measured")
    first, last = summary["val_accuracy_first"], summary["val_accuracy_last"]
    text = Text.assemble(decimal_text(first, 3), " -> ", (decimal_text(last, 3), "bold"))
    text.append(f" on the validation set, {len(summary['val_accuracy_by_version'])} measured")
    if summary["seconds_to_080"] is not None:
        text.append(f", 0.80 after {seconds_text(summary['seconds_to_080'])}")
    return text


def _training(summary: Mapping[str, Any]) -> str:
    start, train = seconds_text(summary["startup_seconds"]), seconds_text(summary["train_seconds"])
    reward = decimal_text(summary["reward_last"], 3)
    return f"{summary['steps']} updates, {summary['versions']} versions in {train} after {start}, last reward {reward}"


def _syncs(syncs: Mapping[str, Any]) -> str:
    if not syncs["count"]:
        return "none"
    aborted = f", {syncs['aborted_count']} aborted" if syncs["aborted_count"] else ""
    pause = f"pause {seconds_text(syncs['pause_seconds_p50'])} (p99 {seconds_text(syncs['pause_seconds_p99'])})"
    took = f"{seconds_text(syncs['seconds_p50'])} (p99 {seconds_text(syncs['seconds_p99'])})"
    verified = f"{syncs['verified_count']} of {syncs['count']} verified{aborted}"
    moved = bytes_text(syncs["bytes"])
    if syncs["delta_count"]:
        moved += f" ({syncs['delta_count']} deltas; {bytes_text(syncs['full_bytes'])} in full)"
    return f"{verified}, {moved}, each {took}, {pause}"


def _checkpoints(checkpoints: Mapping[str, Any]) -> str:
    failed = f", {checkpoints['failed_count']} failed" if checkpoints["failed_count"] else ""
    took = f"each {seconds_text(checkpoints['seconds_p50'])} (max {seconds_text(checkpoints['seconds_max'])})"
    return f"{checkpoints['saved_count']} saved{failed}, {bytes_text(checkpoints['bytes'])}, {took}"


def _lives(summary: Mapping[str, Any]) -> str:
    lost = summary["lost_lineage"]
    shown = ", ".join(lost["ids"][:SHOWN_RANGES]) + (", ..." if len(lost["ids"]) > SHOWN_RANGES else "")
    what = f"{count_text(lost['samples'])} samples ({shown})" if lost["samples"] else "no sample"
    return f"started {summary['lives']} times; lost lineage: {what}, {lost['updates']} updates"


def _samples(samples: Mapping[str, Any]) -> str:
    parts = [f"{count_text(samples['admitted'])} admitted", f"{count_text(samples['trained'])} trained"]
    parts += [f"{count_text(count)} dropped ({reason})" for reason, count in samples["dropped"].items()]
    parts += [f"{count_text(samples[name])} {name}" for name in ("failed", "open") if samples[name]]
    return ", ".join(parts)


def _lag(lag: Mapping[str, Any]) -> str:
    if lag["mean"] is None:
        return "no token was trained"
    predicted = decimal_text(lag["predicted_mean"], 2)
    return f"mean {decimal_text(lag['mean'], 2)} ({predicted} predicted), p99 {lag['p99']}, max {lag['max']} versions"


def _lengths(lengths: Mapping[int, int]) -> str:
    """Responses by length, in powers of two: `{1: 2, 2: 1, 3: 4}` is "responses of 1: 2, 2-3: 5 tokens"."""
    groups: Counter[int] = Counter()
    for length, count in lengths.items():
        groups[length.bit_length()] += count
    parts = [f"{_span(bits)}: {count_text(count)}" for bits, count in sorted(groups.items())]
    return f"responses of {', '.join(parts)} tokens"


def _span(bits: int) -> str:
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low >= high else f"{low}-{high}"
