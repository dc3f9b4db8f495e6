"""The soft overlong punishment by hand: DAPO's example has a limit of 20,480 tokens, 4,096 of them the buffer."""

from __future__ import annotations

import pytest

from paceline.algo.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)]
)
def test_by_hand(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, max_response_length=20480, buffer_length=4096, penalty_factor=1.0) == pytest.approx(
        expected
    )


def test_the_factor_scales_it() -> None:
    assert overlong_penalty(20, max_response_length=20, buffer_length=4, penalty_factor=2.5) == -2.5
