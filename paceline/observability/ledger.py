"""The ledger of samples (L1): every admitted sample ends exactly once - trained, dropped for a reason, or failed.

A fold over the lives of a run. Within a life it does not depend on the order of its input: an end may be read before
the admission, since two processes write them. Of an earlier life only what lies in the surviving lineage counts: what
it did after the checkpoint is undone, and a sample that it admitted after it has ended as `lost_lineage`. What is wrong
is known only when everything has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.core.events import AnyEvent, RunResumed, SampleAdmitted, SampleDropped, SampleFailed, SampleTrained
from paceline.core.sample import sample_number
from paceline.observability.lives import Life, descent

MAX_ERRORS = 100
LOST = "lost_lineage"


class Ledger:
    """Counts of samples by what became of them in the lineage of the last of `lives`."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self.trained = 0
        self.failed = 0
        self.dropped: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self._ended: dict[str, str] = {}
        self._errors: list[str] = []
        for life, cut in reversed(descent(lives)):
            began, ended = _began_before(cut), _ended_before(cut)
            for record in life.records:
                self._feed(record.event, began, ended)
        ever = {one for life in lives for one in _admitted_in(life)}
        self.lost = sorted(ever - self._admitted, key=lambda one: (sample_number(one), one))
        self.dropped[LOST] += len(self.lost)
        self.dropped = +self.dropped

    @property
    def admitted(self) -> int:
        """Samples that began, in any life."""
        return len(self._admitted) + len(self.lost)

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

    def _feed(self, event: AnyEvent, began: Callable[[str], bool], ended: Callable[[str], bool]) -> None:
        match event:
            case SampleAdmitted(ids=ids):
                self._admit([one for one in ids if began(one)])
            case SampleTrained(ids=ids, step=step):
                self.trained += self._end([one for one in ids if ended(one)], f"trained (step {step})")
            case SampleDropped(ids=ids, reason=reason):
                self.dropped[reason] += self._end([one for one in ids if ended(one)], f"dropped ({reason})")
            case SampleFailed(ids=ids):
                self.failed += self._end([one for one in ids if ended(one)], "failed")
            case _:
                pass

    def _admit(self, ids: Sequence[str]) -> None:
        for one in ids:
            if one in self._admitted:
                self._errors.append(f"sample {one} was admitted twice")
            self._admitted.add(one)

    def _end(self, ids: Sequence[str], how: str) -> int:
        for one in ids:
            if one in self._ended:
                self._errors.append(f"sample {one} ended twice: {self._ended[one]}, then {how}")
            self._ended.setdefault(one, how)
        return len(ids)


def _ended_before(cut: RunResumed | None) -> Callable[[str], bool]:
    """Whether the end of a sample counts, by its id: it had ended when the checkpoint was taken."""
    if cut is None:
        return lambda one: True
    admitted, restored = cut.admitted, frozenset(cut.restored)
    return lambda one: sample_number(one) <= admitted and one not in restored


def _began_before(cut: RunResumed | None) -> Callable[[str], bool]:
    """Whether the admission of a sample counts."""
    return lambda one: cut is None or sample_number(one) <= cut.admitted


def _admitted_in(life: Life) -> set[str]:
    return {one for record in life.records if isinstance(record.event, SampleAdmitted) for one in record.event.ids}
