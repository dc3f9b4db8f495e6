"""The version law (V3) and exact admission arithmetic.

A version is `(life, n)`: each start of a run begins a new life, each weight sync raises n. Order is lexicographic.
On the wire and beside every token it is one int64: life in the upper 23 bits, n in the lower 40. A resumed life goes
on counting n where its checkpoint stood. Lag is counted along the lineage: versions of an earlier life count up to
where this life's ancestors left it; every other token has lost its lineage and has no lag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from paceline.core.errors import ConfigError, VersionError

_N_BITS = 40
_MAX_N = (1 << _N_BITS) - 1
_MAX_LIFE = (1 << 23) - 1


class Version(NamedTuple):
    """One version of the weights.

    Example: `Version(1, 7).packed == (1 << 40) + 7`; `Version.unpack(Version(1, 7).packed) == Version(1, 7)`.
    """

    life: int
    n: int

    @property
    def packed(self) -> int:
        """The version as one non-negative int64; order is kept."""
        if not (0 <= self.life <= _MAX_LIFE and 0 <= self.n <= _MAX_N):
            raise VersionError(f"version {self.life}.{self.n} does not fit 23 + 40 bits")
        return (self.life << _N_BITS) | self.n

    @staticmethod
    def unpack(packed: int) -> Version:
        """Inverse of `packed`."""
        if packed < 0:
            raise VersionError(f"packed version {packed} is negative")
        return Version(packed >> _N_BITS, packed & _MAX_N)

    def next(self) -> Version:
        """The next version of the same life."""
        return Version(self.life, self.n + 1)

    def __str__(self) -> str:
        return f"{self.life}.{self.n}"


class Lineage(msgspec.Struct, frozen=True):
    """The versions that the weights of one life descend from.

    `begin` is the n of this life's first version. `ancestors` maps each earlier life to the last n of it that counts:
    where its checkpoint was taken, or, for a life that was resumed from the same checkpoint as this one, its first
    version, whose weights are the same bit for bit.

    Example: life 2 was resumed from a checkpoint of version 1.7 and pushes those weights as 2.7:
    `Lineage(life=2, begin=7, ancestors={1: 7})`.
    """

    life: int
    begin: int = 0
    ancestors: dict[int, int] = msgspec.field(default_factory=dict)

    def holds(self, version: Version) -> bool:
        """Whether the weights of this version are among those that this life descends from."""
        if version.life == self.life:
            return version.n >= self.begin
        return version.n <= self.ancestors.get(version.life, -1)

    def lag(self, captured: Version, token: Version) -> int:
        """Versions between the captured one (of this life) and the one that made a token; never negative (V7).

        Raises:
            VersionError: the token's lineage is lost, it is newer than the capture, or the capture is of another life.
        """
        if captured.life != self.life:
            raise VersionError(f"version {captured} was not captured in life {self.life}")
        if not self.holds(token):
            raise VersionError(f"a token of version {token} has no lag against {captured}: its lineage is lost")
        return version_lag(captured, Version(self.life, token.n))

    def child(self, life: int, *, left_at: int, begin: int, siblings: Sequence[int] = ()) -> Lineage:
        """The lineage of a life that is resumed from a checkpoint of this one, taken at version n `left_at`.

        `siblings` are lives that were resumed from the same checkpoint before.
        """
        return Lineage(life, begin, {**self.ancestors, self.life: left_at, **dict.fromkeys(siblings, begin)})


def version_lag(captured: Version, token: Version) -> int:
    """Versions between the trainer's captured version and the one that made a token; never negative (V7).

    Raises:
        VersionError: the token is newer than the capture, or of another life.
    """
    if token.life != captured.life:
        raise VersionError(f"a token of version {token} has no lag against life {captured.life}: its lineage is lost")
    if token.n > captured.n:
        raise VersionError(f"a token of version {token} is newer than the captured version {captured}")
    return captured.n - token.n


def exact_fraction(value: float | str) -> Fraction:
    """The decimal a person wrote, not its binary neighbour: 0.36 is 36/100.

    Raises:
        ConfigError: not a finite decimal number.
    """
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{value!r} is not a finite number") from error


def max_required_samples(required_samples: int, staleness_threshold: float, trigger_parameter_sync_step: int) -> int:
    """floor(required * (1 + threshold) * trigger) in exact arithmetic.

    Formula of verl's fully_async_policy, whose float product truncates: (10, 0.36, 5) is 68, not 67.
    """
    exact = required_samples * (1 + exact_fraction(staleness_threshold)) * trigger_parameter_sync_step
    return math.floor(exact)
