"""The ledger of samples (L1): every admitted sample ends exactly once - trained, dropped for a reason, or failed.

A fold that does not depend on the order of its input: an end may be read before the admission, since two processes
write them. What is wrong is known only when everything has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.core.events import AnyEvent, SampleAdmitted, SampleDropped, SampleFailed, SampleTrained

MAX_ERRORS = 100


class Ledger:
    """Counts of samples by what became of them."""

    def __init__(self) -> None:
        self.trained = 0
        self.failed = 0
        self.dropped: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self._ended: dict[str, str] = {}
        self._errors: list[str] = []

    def feed(self, event: AnyEvent) -> None:
        """Take one event; those that are not about the life of a sample are ignored."""
        match event:
            case SampleAdmitted(ids=ids):
                self._admit(ids)
            case SampleTrained(ids=ids, step=step):
                self.trained += len(ids)
                self._end(ids, f"trained (step {step})")
            case SampleDropped(ids=ids, reason=reason):
                self.dropped[reason] += len(ids)
                self._end(ids, f"dropped ({reason})")
            case SampleFailed(ids=ids):
                self.failed += len(ids)
                self._end(ids, "failed")
            case _:
                pass

    @property
    def admitted(self) -> int:
        """Samples that began."""
        return len(self._admitted)

    @property
    def open(self) -> int:
        """Samples that began and have not ended."""
        return len(self._admitted - self._ended.keys())

    def errors(self) -> list[str]:
        """Every break of L1, one line each, at most `MAX_ERRORS` and a count of the rest."""
        strays = sorted(self._ended.keys() - self._admitted)
        found = self._errors + [f"sample {one} {self._ended[one]}, but was never admitted" for one in strays]
        more = len(found) - MAX_ERRORS
        return found if more <= 0 else [*found[:MAX_ERRORS], f"and {more} more"]

    def _admit(self, ids: Iterable[str]) -> None:
        for one in ids:
            if one in self._admitted:
                self._errors.append(f"sample {one} was admitted twice")
            self._admitted.add(one)

    def _end(self, ids: Iterable[str], how: str) -> None:
        for one in ids:
            if one in self._ended:
                self._errors.append(f"sample {one} ended twice: {self._ended[one]}, then {how}")
            self._ended.setdefault(one, how)
