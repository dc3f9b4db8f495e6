"""What a run that was killed and resumed has really trained, worked out from `events.jsonl` and `rollouts/` alone.

Independent on purpose: nothing of paceline is imported, so a fault in its own folds cannot hide here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
VERSION_BITS = 40


@dataclass
class Life:
    """One start of the run. `resumed` is its `run.resumed` event, None for a beginning."""

    number: int
    resumed: Event | None = None
    events: list[Event] = field(default_factory=list)


@dataclass
class Findings:
    """`problems` is empty when the run is right. `responses` maps (number, index) to the trained response's record."""

    problems: list[str] = field(default_factory=list)
    trained: int = 0
    lost_samples: int = 0
    lost_updates: int = 0
    responses: dict[tuple[int, int], Event] = field(default_factory=dict)


def read_lines(path: Path) -> list[Event]:
    """Whole JSON lines; those that a kill has cut are left out."""
    found: list[Event] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def lives_of(run_dir: Path) -> list[Life]:
    """All starts of the run, in order."""
    lives: list[Life] = []
    for event in read_lines(run_dir / "events.jsonl"):
        if event["kind"] == "run.started":
            lives.append(Life(event["life"]))
        elif event["kind"] == "run.resumed":
            lives[-1].resumed = event
        lives[-1].events.append(event)
    return lives


def chain_of(lives: Sequence[Life]) -> list[tuple[Life, Event | None]]:
    """The last life and its ancestors, each with the resume that left it."""
    by_number = {life.number: life for life in lives}
    chain: list[tuple[Life, Event | None]] = [(lives[-1], None)]
    while (resumed := chain[-1][0].resumed) is not None:
        chain.append((by_number[resumed["from_life"]], resumed))
    return chain


def number_of(sample_id: str) -> int:
    """Number of a sample over all lives."""
    return int(sample_id.rpartition("-")[2])


def check(run_dir: Path) -> Findings:
    """In the surviving lineage every prompt that was drawn ended once, every update was made once, and every token is
    of a version of that lineage.
    """
    findings = Findings()
    lives = lives_of(run_dir)
    chain = chain_of(lives)
    trained_by: dict[str, tuple[int, int]] = {}  # sample id -> (step, life)
    ended: Counter[str] = Counter()
    admitted: list[int] = []
    steps: list[int] = []
    for life, cut in chain:
        limit = math.inf if cut is None else cut["step"]
        last = math.inf if cut is None else cut["admitted"]
        restored = set() if cut is None else set(cut["restored"])
        for event in life.events:
            kind = event["kind"]
            if kind == "sample.admitted":
                admitted += [number_of(one) for one in event["ids"] if number_of(one) <= last]
            elif kind == "train.step" and event["step"] <= limit:
                steps.append(event["step"])
            elif kind in ("sample.trained", "sample.dropped", "sample.failed"):
                counted = [one for one in event["ids"] if number_of(one) <= last and one not in restored]
                ended.update(counted)
                if kind == "sample.trained":
                    trained_by.update((one, (event["step"], life.number)) for one in counted)
                    if any(event["step"] > limit for _ in counted):
                        findings.problems.append(f"{counted} trained after the checkpoint, yet not restored")
    _say_duplicates(findings, "update", steps)
    _say_duplicates(findings, "admitted number", admitted)
    _say_gaps(findings, "update", steps)
    _say_gaps(findings, "admitted number", admitted)
    findings.problems += [f"sample {one} ended {count} times" for one, count in ended.items() if count > 1]
    missing = set(admitted) - {number_of(one) for one in ended}
    if missing and chain[0][0].events[-1].get("outcome") == "completed":
        findings.problems.append(f"samples that never ended: {sorted(missing)[:8]}")
    findings.trained = len(trained_by)
    findings.lost_updates = sum(e["kind"] == "train.step" for life in lives for e in life.events) - len(steps)
    every = {one for life in lives for e in life.events if e["kind"] == "sample.admitted" for one in e["ids"]}
    findings.lost_samples = len(every) - len(admitted)
    _check_rollouts(run_dir, trained_by, chain, lives, findings)
    return findings


def _check_rollouts(
    run_dir: Path,
    trained_by: dict[str, tuple[int, int]],
    chain: Sequence[tuple[Life, Event | None]],
    lives: Sequence[Life],
    findings: Findings,
) -> None:
    held = {life.number: math.inf if cut is None else cut["version"] % (1 << VERSION_BITS) for life, cut in chain}
    bases = {(cut["from_life"], cut["step"]): cut["version"] % (1 << VERSION_BITS) for _, cut in chain if cut}
    for life in lives:  # resumed from the same checkpoint, and died: its first weights are those of the checkpoint
        base = life.resumed and bases.get((life.resumed["from_life"], life.resumed["step"]))
        if base is not None:
            held.setdefault(life.number, base)
    prompts: Counter[str] = Counter()
    seen: set[str] = set()
    for path in (run_dir / "rollouts").glob("*.jsonl"):
        for record in read_lines(path):
            sample_id = record["sample_id"]
            if record["fate"] != "trained" or trained_by.get(sample_id, (0, 0))[1] != record["life"]:
                continue
            seen.add(sample_id)
            prompts[record["prompt_id"]] += 1
            for index, response in enumerate(record["responses"]):
                findings.responses[number_of(sample_id), index] = response
                for version, _ in response["versions"]:
                    life_number, _, n = version.partition(".")
                    if int(n) > held.get(int(life_number), -1):
                        findings.problems.append(f"{sample_id} holds a token of the lost version {version}")
    findings.problems += [f"prompt {one} was trained {count} times" for one, count in prompts.items() if count > 1]
    if seen != trained_by.keys():
        findings.problems.append(f"{len(trained_by.keys() - seen)} trained samples are not in rollouts/")


def _say_duplicates(findings: Findings, what: str, numbers: Iterable[int]) -> None:
    findings.problems += [
        f"{what} {one} is there {count} times" for one, count in Counter(numbers).items() if count > 1
    ]


def _say_gaps(findings: Findings, what: str, numbers: Sequence[int]) -> None:
    missing = set(range(1, max(numbers, default=0) + 1)) - set(numbers)
    if missing:
        findings.problems.append(f"{what}s are missing: {sorted(missing)[:8]}")


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Two-sample statistic and its asymptotic p-value (conservative where values repeat).

    Source: Kolmogorov 1933, Smirnov 1948; the small-sample correction is Stephens' (1970).
    """
    one, two = sorted(first), sorted(second)
    statistic = 0.0
    i = j = 0
    while i < len(one) and j < len(two):
        value = min(one[i], two[j])
        while i < len(one) and one[i] == value:
            i += 1
        while j < len(two) and two[j] == value:
            j += 1
        statistic = max(statistic, abs(i / len(one) - j / len(two)))
    root = math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    scaled = (root + 0.12 + 0.11 / root) * statistic
    if scaled < 0.2:
        return statistic, 1.0
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return statistic, min(1.0, max(0.0, tail))
