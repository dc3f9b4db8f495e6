"""How figures are written for people."""

from __future__ import annotations

import pytest

from paceline.observability.figures import (
    bytes_text,
    clock_text,
    count_text,
    decimal_text,
    ratio_text,
    seconds_text,
    sparkline,
    version_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0 ms"),
        (0.0012, "1.2 ms"),
        (0.2, "200 ms"),
        (4.26, "4.3 s"),
        (42.4, "42 s"),
        (65.0, "1:05"),
        (3700.0, "1:01:40"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (3_900_000, "3.9 MB"), (2e12, "2.0 TB")])
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_other_figures() -> None:
    assert clock_text(9.9) == "0:09"
    assert count_text(18240.4) == "18,240"
    assert count_text(None) == "-"
    assert ratio_text(0.125) == "12 %"
    assert ratio_text(None) == "-"
    assert decimal_text(0.25, 3) == "0.250"
    assert decimal_text(float("inf"), 3) == "-"
    assert version_text((1 << 40) + 7) == "1.7"
    assert version_text(None) == "-"


@pytest.mark.parametrize(
    ("values", "width", "blocks"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([0.0, 1.0], 8, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([1.0, float("nan"), 0.0], 8, "█▁"),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_sparkline(values: list[float], width: int, blocks: str) -> None:
    assert sparkline(values, width) == blocks
