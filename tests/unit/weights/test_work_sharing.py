"""Every item once, results in order, and what is raised reaches the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paceline.weights.work_sharing import share_out


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 3, 1000])
def test_results_are_in_the_order_of_the_items(threads: int, items: int) -> None:
    assert share_out(threads, lambda item: item * item, (item for item in range(items))) == [
        item * item for item in range(items)
    ]


def test_threads_really_share() -> None:
    both = threading.Barrier(2)
    assert share_out(2, lambda item: both.wait(30) >= 0 and item, range(2)) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_call_raises_is_raised_when_all_have_ended(threads: int) -> None:
    called: list[int] = []

    def call(item: int) -> None:
        called.append(item)
        if item == 5:
            raise ValueError("boom")

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="boom"):
        share_out(threads, call, range(20))
    assert set(threading.enumerate()) <= before  # one of a test before this one may end meanwhile
    assert sorted(called) == sorted(set(called))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_the_making_of_an_item_raises_is_raised(threads: int) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        share_out(threads, lambda item: item, items())
