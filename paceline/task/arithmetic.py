"""Embedded task: two-operand arithmetic over two-digit numbers, with a three-way split that cannot leak.

Law: the split is a function of the unordered pair of operands alone, so 12+34, 34+12, 12-34 and 34-12 lie together;
warm start, training and validation are disjoint even up to commutation. The order within a split is a fixed shuffle (by
digest), so every prefix of it is a fair sample. The score is exact match: 1.0 or 0.0, nothing between.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Split = Literal["warm_start", "train", "validation"]

SMALLEST_OPERAND: Final = 10
LARGEST_OPERAND: Final = 99

_SALT: Final = b"paceline-arith-1"
_BUCKETS: Final = 1000
_VALIDATION_BELOW: Final = 170
_TRAIN_BELOW: Final = 500
_WELL_FORMED: Final = re.compile(r"-?[0-9]{1,3}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: `prompt` is what the model continues ("47+85="), `answer` the only right continuation ("132").

    `problem_id` is unique over all three splits and stable between releases.
    """

    problem_id: str
    prompt: str
    answer: str


def problems(split: Split) -> tuple[Problem, ...]:
    """All problems of one split, in a stable shuffled order.

    Raises ValueError for a name that is no split.
    """
    if split not in ("warm_start", "train", "validation"):
        raise ValueError(f"unknown split {split!r}: expected 'warm_start', 'train' or 'validation'")
    members = (problem for a, b, problem in _every_problem() if _split_of_pair(a, b) == split)
    return tuple(sorted(members, key=lambda problem: _digest(problem.problem_id)))


def score(response_text: str, answer: str) -> float:
    """1.0 if the response is exactly the answer, else 0.0.

    `response_text` is what was generated before the end token; one trailing newline is forgiven, nothing else.
    """
    return 1.0 if response_text.removesuffix("\n") == answer else 0.0


def is_well_formed(response_text: str) -> bool:
    """Whether the response has the shape of an answer: an optional minus and one to three digits, right or wrong."""
    return _WELL_FORMED.fullmatch(response_text.removesuffix("\n")) is not None


def _every_problem() -> Iterator[tuple[int, int, Problem]]:
    operands = range(SMALLEST_OPERAND, LARGEST_OPERAND + 1)
    for a in operands:
        for b in operands:
            yield a, b, Problem(problem_id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b))
            yield a, b, Problem(problem_id=f"{a}-{b}", prompt=f"{a}-{b}=", answer=str(a - b))


def _split_of_pair(a: int, b: int) -> Split:
    bucket = int.from_bytes(_digest(f"{min(a, b)},{max(a, b)}"), "big") % _BUCKETS
    if bucket < _VALIDATION_BELOW:
        return "validation"
    return "train" if bucket < _TRAIN_BELOW else "warm_start"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("ascii"), digest_size=8, salt=_SALT).digest()
