"""Outstanding: the samples that were admitted and have not reached the trainer, and the budget that bounds them.

    admitted == failed + taken + len(outstanding)          in every state, over all lives

Law: a sample leaves in one way: it fails, is dropped on the way, or the trainer takes it. The message queue is first
in, first out, so its count of taken samples tells which ones were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.checkpoint import RollouterSnapshot
from paceline.core.commands import RolloutStatistics
from paceline.core.sample import sample_id_of
from paceline.rollout.admission import AdmissionBudget


class Outstanding:
    """Counts over all lives of the run; `total` samples have to reach the trainer, `required` at a time; `allowed` are
    one window's.
    """

    def __init__(self, *, life: int, total: int, required: int, allowed: int) -> None:
        self.budget = AdmissionBudget(allowed)
        self._life = life
        self._total = total
        self._required = required
        self._admitted = self._failed = self._dropped = 0
        self._ids: dict[str, None] = {}  # in the order of admission
        self._sent: deque[str] = deque()
        self._taken = self._taken_before = 0
        self._window_spent = 0
        self._trained_before: dict[int, int] = {}
        self._captured = -1
        self._under: dict[str, int] = {}
        self._floor = -1  # admissions under an older version would come too late for the batch that takes such samples
        self._is_asked = False

    @property
    def admitted_under(self) -> dict[str, int]:
        """Sample id -> packed version published when it was admitted, where that was said; until it is consumed."""
        return self._under

    @property
    def wanted(self) -> int:
        """Samples that are still to be admitted for the run's total."""
        return self._total - (self._admitted - self._failed - self._dropped)

    def admissible(self, published: int) -> int:
        """Samples that may be admitted now, under this published version (packed).

        Once the trainer has asked which samples are `admitted_before` a version, none is added to these until that
        version is published. Its batch must be filled for all that: where less than one is left of all samples, there
        is room for the rest in any window, and where that version can only be captured after the batch, before it.
        """
        lacking = max(0, self._required - len(self._under)) if self._is_asked else 0
        if published >= self._floor:
            return max(lacking, self.budget.free)
        return lacking if published == self._captured < self._floor else 0

    @property
    def undelivered(self) -> int:
        """Samples that the trainer still has to be given when a life begins."""
        return self._total - (self._taken_before - self._dropped)

    def admit(self, under: int | None = None) -> str:
        """A sample begins, `under` this version if that is to be kept; returns its id. It is `admissible`."""
        self._admitted += 1
        sample_id = sample_id_of(self._life, self._admitted)
        self.budget.make_room(1)
        self.budget.admit(sample_id)
        self._ids[sample_id] = None
        if under is not None:
            self._under[sample_id] = under
        return sample_id

    def fail(self, sample_id: str) -> None:
        """It will not reach the trainer: its place is free, and another one is wanted."""
        self._failed += 1
        self._ids.pop(sample_id, None)
        self._under.pop(sample_id, None)
        self.budget.give_back(sample_id)

    def admitted_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        """Samples that the trainer has not consumed and that were admitted before this version (packed) was published;
        `consumed` are those that it has since it last asked. From now on no sample is admitted under an older version.
        """
        for sample_id in consumed:
            self._under.pop(sample_id, None)
        self._floor, self._is_asked = version, True
        return [sample_id for sample_id, under in self._under.items() if under < version]

    def send(self, sample_ids: Sequence[str]) -> None:
        """They go to the message queue in this order, after all that went before."""
        self._sent.extend(sample_ids)

    def take(self, taken: int) -> None:
        """So many samples of this life were taken from the queue in all."""
        while self._taken < taken and self._sent:
            self._ids.pop(self._sent.popleft(), None)
            self._taken += 1

    def drop(self, sample_ids: Sequence[str]) -> None:
        """The trainer has taken them and dropped them: others are wanted."""
        self._dropped += len(sample_ids)
        for sample_id in sample_ids:
            self.budget.give_back_taken(sample_id)

    def holds(self, sample_id: str) -> bool:
        """Whether this sample is on its way, as far as is known."""
        return sample_id in self._ids

    def capture(self, version: int, trained: int) -> None:
        """So many samples of all lives are trained when this version (packed) is captured."""
        self._trained_before[version] = trained
        self._captured = version

    def open_window(self, published: int) -> None:
        """This version (packed) is published."""
        self._is_asked = self._is_asked and published < self._floor
        taken = self._taken_before + self._taken - self._dropped
        trained = self._trained_before.get(published, taken)  # whoever does not say it holds nothing at a publication
        self._trained_before = {version: n for version, n in self._trained_before.items() if version > published}
        self.budget.open_window(self._ids, self._window_spent + max(0, taken - trained))
        self._window_spent = 0

    def restore(self, snapshot: RollouterSnapshot, admitted_under: dict[str, int]) -> None:
        """Be where an earlier life was; nothing is admitted before the next window."""
        self._admitted, self._failed, self._dropped = snapshot.admitted, snapshot.failed, snapshot.dropped
        self._taken_before, self._window_spent = snapshot.taken, snapshot.window_taken
        self._ids = dict.fromkeys(snapshot.open_ids)
        self._under = admitted_under

    def statistics(self, *, in_flight: int) -> RolloutStatistics:
        """All counts at this moment."""
        return RolloutStatistics(
            admitted=self._admitted,
            failed=self._failed,
            dropped=self._dropped,
            taken=self._taken_before + self._taken,
            outstanding=len(self._ids),
            in_flight=in_flight,
            used=self.budget.used,
            allowed=self.budget.allowed,
        )
