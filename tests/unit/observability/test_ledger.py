"""The ledger of samples: it adds up, in any order, and names what breaks L1."""

from __future__ import annotations

import pytest

from paceline.core.events import AnyEvent, QueueLevel, SampleAdmitted, SampleDropped, SampleFailed, SampleTrained
from paceline.observability.ledger import MAX_ERRORS, Ledger


def ledger_of(*events: AnyEvent) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.feed(event)
    return ledger


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
