"""The lives of a run in its event log, and what of them survives.

A life begins with `run.started` in the order of the file: its driver writes that only when no process of an earlier one
writes any more. The surviving lineage is the last life, and of each life that it descends from what came before the
checkpoint: see `run.resumed`. What else was done is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.events import RunResumed, RunStarted, SampleTrained, TrainStep
from paceline.observability.reader import Record


@dataclass(slots=True)
class Life:
    """One life: its records in the order of the file. `number` 0: the log does not say; `resumed` None: a beginning."""

    number: int = 0
    resumed: RunResumed | None = None
    records: list[Record] = field(default_factory=list)


def split_lives(records: Iterable[Record]) -> list[Life]:
    """The lives in the order of the file, at least one."""
    lives = [Life()]
    for record in records:
        if isinstance(record.event, RunStarted):
            if lives[-1].number:
                lives.append(Life())
            lives[-1].number = record.event.life
        elif isinstance(record.event, RunResumed):
            lives[-1].resumed = record.event
        lives[-1].records.append(record)
    return lives


def descent(lives: Sequence[Life]) -> list[tuple[Life, RunResumed | None]]:
    """The last life and those that it descends from, newest first, each with the resume that left it (None: none)."""
    by_number = {life.number: life for life in lives}
    chain: list[tuple[Life, RunResumed | None]] = [(lives[-1], None)]
    while (cut := chain[-1][0].resumed) is not None and (parent := by_number.get(cut.from_life)) is not None:
        if any(parent is life for life, _ in chain):
            break  # a log that contradicts itself; what it says of the samples is named by the ledger
        chain.append((parent, cut))
    return chain


def surviving(lives: Sequence[Life]) -> list[Record]:
    """All records but the updates, and the samples trained by them, that are lost; in the order of the file."""
    last_step = {id(life): cut.step if cut else None for life, cut in descent(lives)}
    kept: list[Record] = []
    for life in lives:
        limit = last_step.get(id(life), 0)
        for record in life.records:
            event = record.event
            if isinstance(event, TrainStep | SampleTrained) and limit is not None and event.step > limit:
                continue
            kept.append(record)
    return kept
