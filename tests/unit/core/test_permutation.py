"""The seeded order: every number once, another order for another seed, the same for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.permutation import SeededPermutation


def order(size: int, seed: str) -> list[int]:
    permutation = SeededPermutation(size, seed)
    return [permutation[place] for place in range(len(permutation))]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_every_number_comes_once(size: int) -> None:
    assert sorted(order(size, "a")) == list(range(size))


def test_it_follows_from_size_and_seed() -> None:
    assert order(100, "0-0") == order(100, "0-0") != order(100, "0-1")
    # A cursor of an earlier release has to find its place.
    assert order(8, "0-0") == [2, 1, 7, 5, 4, 6, 3, 0]


def test_all_orders_of_three_are_about_equally_frequent() -> None:
    found = Counter(tuple(order(3, str(seed))) for seed in range(1200))
    assert len(found) == 6
    assert min(found.values()) > 140


def test_places_and_numbers_do_not_go_together() -> None:
    """Of a fair order every quarter of the places holds about a quarter of the numbers of every quarter."""
    size = 4000
    numbers = order(size, "b")
    cells = Counter((4 * place // size, 4 * number // size) for place, number in enumerate(numbers))
    assert len(cells) == 16
    assert all(200 < count < 300 for count in cells.values())


def test_a_place_outside_is_refused() -> None:
    permutation = SeededPermutation(3, "a")
    for place in (-1, 3):
        with pytest.raises(IndexError):
            permutation[place]


def test_two_million_numbers_cost_nothing_before_they_are_asked_for() -> None:
    permutation = SeededPermutation(2_000_000, "a")
    drawn = {permutation[place] for place in range(1000)}
    assert len(drawn) == 1000
    assert max(drawn) < 2_000_000
