"""The version law and exact admission arithmetic (case C17)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, VersionError
from paceline.core.version import Lineage, Version, exact_fraction, max_required_samples, version_lag

lives = st.integers(0, 2**23 - 1)
numbers = st.integers(0, 2**40 - 1)


@settings(deadline=None)
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


# Life 2 went on from version 1.4; lives 5 and 6 both went on from 2.7.
LINEAGE = Lineage(1).child(2, left_at=4, begin=4).child(6, left_at=7, begin=7, siblings=[5])


@pytest.mark.parametrize(
    ("version", "held"),
    [
        (Version(1, 0), True),
        (Version(1, 4), True),
        (Version(1, 5), False),
        (Version(2, 4), True),
        (Version(2, 7), True),
        (Version(2, 8), False),
        (Version(3, 7), False),
        (Version(5, 7), True),
        (Version(5, 8), False),
        (Version(6, 7), True),
        (Version(6, 6), False),
        (Version(7, 7), False),
    ],
)
def test_a_lineage_holds_what_its_weights_descend_from(version: Version, held: bool) -> None:
    assert LINEAGE.holds(version) is held
    if not held:
        with pytest.raises(VersionError):
            LINEAGE.lag(Version(6, 9), version)


def test_lag_is_counted_over_lives() -> None:
    assert LINEAGE.lag(Version(6, 9), Version(1, 4)) == 5
    assert LINEAGE.lag(Version(6, 9), Version(2, 7)) == 2
    assert LINEAGE.lag(Version(6, 7), Version(5, 7)) == 0
    assert LINEAGE.lag(Version(6, 9), Version(6, 9)) == 0
    with pytest.raises(VersionError, match="newer"):
        LINEAGE.lag(Version(6, 9), Version(6, 10))
    with pytest.raises(VersionError, match="not captured in life 6"):
        LINEAGE.lag(Version(7, 9), Version(6, 9))
