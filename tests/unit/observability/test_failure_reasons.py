"""Reasons of failed samples, counted and bounded."""

from __future__ import annotations

from paceline.core.events import GroupReduced, SampleFailed
from paceline.observability.failure_reasons import (
    MOST_REASONS,
    OTHERS,
    TellingFailures,
    failure_reasons,
    lacking_reasons,
)


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


def test_responses_that_are_missing_from_survivors_are_counted_by_reason() -> None:
    reduced = [
        GroupReduced(sample_id=str(i), lacking=n, reason=why) for i, n, why in ((1, 2, "x"), (2, 1, "y"), (3, 1, "x"))
    ]
    assert list(lacking_reasons(reduced).items()) == [("x", 3), ("y", 1)]


def test_a_line_for_the_first_the_tenth_the_hundredth() -> None:
    telling = TellingFailures()
    said = [told for number in range(1, 251) if (told := telling.count(SampleFailed(ids=[str(number)], error="x")))]
    assert said == [("x", 1), ("x", 10), ("x", 100)]
    assert telling.count(SampleFailed(ids=["a", "b"], error="y")) == ("y", 2)


def test_reasons_that_are_all_different_do_not_flood_the_lines() -> None:
    telling = TellingFailures()
    said = [told for number in range(1000) if (told := telling.count(SampleFailed(ids=["a"], error=f"row {number}")))]
    assert said[:MOST_REASONS] == [(f"row {number}", 1) for number in range(MOST_REASONS)]
    assert said[MOST_REASONS:] == [(OTHERS, 1), (OTHERS, 10), (OTHERS, 100)]
