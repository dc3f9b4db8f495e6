"""Reasons of failed samples, counted and bounded."""

from __future__ import annotations

from paceline.core.events import SampleFailed
from paceline.observability.failure_reasons import MOST_REASONS, OTHERS, failure_reasons


def test_reasons_are_counted_in_samples_most_frequent_first() -> None:
    failures = [SampleFailed(ids=ids, error=error) for ids, error in ((["a"], "x"), (["b", "c"], "y"), (["d"], "y"))]
    assert list(failure_reasons(failures).items()) == [("y", 3), ("x", 1)]
    assert failure_reasons([]) == {}


def test_many_reasons_are_counted_together() -> None:
    failures = [SampleFailed(ids=[str(i)], error=f"{i:02}") for i in range(MOST_REASONS + 3)]
    found = failure_reasons([*failures, SampleFailed(ids=["x"], error="often"), SampleFailed(ids=["y"], error="often")])
    assert next(iter(found)) == "often"
    assert len(found) == MOST_REASONS + 1
    assert found[OTHERS] == 4
