"""The ledger of samples: it adds up, in any order, and names what breaks L1."""

from __future__ import annotations

import pytest

from paceline.core.events import (
    AnyEvent,
    QueueLevel,
    RunResumed,
    RunStarted,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    SampleTrained,
)
from paceline.observability.ledger import MAX_ERRORS, Ledger
from paceline.observability.lives import split_lives
from paceline.observability.reader import Record


def ledger_of(*events: AnyEvent) -> Ledger:
    return Ledger(split_lives(Record(0.0, "driver", seq, event) for seq, event in enumerate(events)))


def trained(*ids: str, step: int = 1) -> SampleTrained:
    return SampleTrained(ids=list(ids), step=step, version=0, lags={})


RUN: list[AnyEvent] = [
    SampleAdmitted(ids=["a", "b", "c"]),
    SampleAdmitted(ids=["d", "e"]),
    QueueLevel(size=1, capacity=2),
    trained("a", "b"),
    SampleDropped(ids=["c"], reason="stale"),
    SampleFailed(ids=["d"], error="no reward"),
]


@pytest.mark.parametrize("events", [RUN, RUN[::-1]])
def test_every_sample_is_counted_once(events: list[AnyEvent]) -> None:
    ledger = ledger_of(*events)
    assert (ledger.admitted, ledger.trained, ledger.failed, ledger.open) == (5, 2, 1, 1)
    assert dict(ledger.dropped) == {"stale": 1}
    assert ledger.errors() == []


def test_a_sample_that_ends_twice_is_named_with_both_ends() -> None:
    ledger = ledger_of(SampleAdmitted(ids=["a"]), trained("a", step=3), SampleDropped(ids=["a"], reason="stale"))
    assert ledger.errors() == ["sample a ended twice: trained (step 3), then dropped (stale)"]
    assert ledger.open == 0


def test_a_sample_that_never_began_and_one_that_began_twice_are_named() -> None:
    ledger = ledger_of(SampleAdmitted(ids=["a", "a"]), SampleFailed(ids=["x"], error="e"), trained("a"))
    assert ledger.errors() == ["sample a was admitted twice", "sample x failed, but was never admitted"]


def test_many_errors_are_cut() -> None:
    ledger = ledger_of(trained(*(str(index) for index in range(MAX_ERRORS + 7))))
    assert len(ledger.errors()) == MAX_ERRORS + 1
    assert ledger.errors()[-1] == "and 7 more"


def started(life: int) -> RunStarted:
    return RunStarted(run_id="r", life=life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=9)


def resumed(from_life: int, step: int, admitted: int, *restored: str) -> RunResumed:
    return RunResumed(from_life=from_life, step=step, version=0, admitted=admitted, restored=list(restored), refused=[])


FIRST_LIFE: list[AnyEvent] = [
    started(1),
    SampleAdmitted(ids=["1-1", "1-2", "1-3", "1-4"]),
    trained("1-1", step=1),
    SampleDropped(ids=["1-2"], reason="zero_variance"),
    # A checkpoint of update 1 is taken here, with 1-3 and 1-4 on their way.
    trained("1-3", step=2),
    SampleFailed(ids=["1-4"], error="no reward"),
    SampleAdmitted(ids=["1-5", "1-6"]),
    trained("1-5", step=3),
]


def test_what_a_life_did_after_its_checkpoint_is_undone_and_what_it_admitted_is_lost() -> None:
    ledger = ledger_of(
        *FIRST_LIFE,
        started(2),
        resumed(1, 1, 4, "1-3", "1-4"),
        SampleAdmitted(ids=["2-5"]),
        trained("1-3", "1-4", step=2),
    )
    assert ledger.errors() == []
    assert (ledger.admitted, ledger.trained, ledger.failed, ledger.open) == (7, 3, 0, 1)
    assert dict(ledger.dropped) == {"zero_variance": 1, "lost_lineage": 2}
    assert ledger.lost == ["1-5", "1-6"]


def test_a_life_that_left_no_checkpoint_is_lost_as_a_whole() -> None:
    ledger = ledger_of(
        *FIRST_LIFE,
        started(2),
        resumed(1, 1, 4, "1-3", "1-4"),
        SampleAdmitted(ids=["2-5"]),
        trained("1-3", "2-5", step=2),
        started(3),
        resumed(1, 1, 4, "1-3", "1-4"),
        trained("1-3", "1-4", step=2),
    )
    assert ledger.errors() == []
    assert (ledger.trained, ledger.open, ledger.lost) == (3, 0, ["1-5", "2-5", "1-6"])


def test_three_lives_one_after_the_other() -> None:
    ledger = ledger_of(
        *FIRST_LIFE,
        started(2),
        resumed(1, 1, 4, "1-3", "1-4"),
        SampleAdmitted(ids=["2-5", "2-6"]),
        trained("1-3", "1-4", step=2),
        started(3),
        resumed(2, 2, 6, "2-5", "2-6"),
        trained("2-5", "2-6", step=3),
    )
    assert ledger.errors() == []
    assert (ledger.trained, ledger.open, ledger.lost) == (5, 0, ["1-5", "1-6"])


def test_a_sample_that_a_resume_trains_again_is_named() -> None:
    ledger = ledger_of(*FIRST_LIFE, started(2), resumed(1, 1, 4, "1-3", "1-4"), trained("1-1", step=2))
    assert ledger.errors() == ["sample 1-1 ended twice: trained (step 1), then trained (step 2)"]


def test_a_sample_that_a_resume_forgets_stays_open() -> None:
    ledger = ledger_of(*FIRST_LIFE[:4], started(2), resumed(1, 1, 4, "1-3"), trained("1-3", step=2))
    assert (ledger.open, ledger.errors()) == (1, [])
