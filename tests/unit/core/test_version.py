"""The version law and exact admission arithmetic (case C17)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, VersionError
from paceline.core.version import Version, exact_fraction, max_required_samples, version_lag

lives = st.integers(0, 2**23 - 1)
numbers = st.integers(0, 2**40 - 1)


@given(lives, numbers, lives, numbers)
def test_packing_is_a_bijection_that_keeps_the_order(life: int, n: int, other_life: int, other_n: int) -> None:
    one, other = Version(life, n), Version(other_life, other_n)
    assert Version.unpack(one.packed) == one
    assert 0 <= one.packed < 2**63
    assert (one < other) == (one.packed < other.packed)


@pytest.mark.parametrize("version", [Version(2**23, 0), Version(0, 2**40), Version(-1, 0), Version(0, -1)])
def test_what_does_not_fit_is_refused(version: Version) -> None:
    with pytest.raises(VersionError, match="does not fit"):
        _ = version.packed


def test_lag_is_never_negative_and_needs_one_life() -> None:
    assert version_lag(Version(1, 6), Version(1, 2)) == 4
    assert version_lag(Version(1, 6), Version(1, 6)) == 0
    with pytest.raises(VersionError, match="newer"):
        version_lag(Version(1, 6), Version(1, 7))
    with pytest.raises(VersionError, match="lineage"):
        version_lag(Version(2, 0), Version(1, 7))


@pytest.mark.parametrize(
    ("required", "threshold", "trigger", "expected"),
    [(10, 0.36, 5, 68), (20, 0.13, 5, 113), (10, 0.18, 5, 59), (3, 0.5, 1, 4), (8, 0.0, 1, 8), (64, 0.5, 2, 192)],
)
def test_the_admission_window_is_exact(required: int, threshold: float, trigger: int, expected: int) -> None:
    assert max_required_samples(required, threshold, trigger) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "a lot"])
def test_what_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="not a finite number"):
        exact_fraction(bad)
