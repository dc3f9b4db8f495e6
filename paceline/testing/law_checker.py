"""LawChecker: judges a run by what it really did, after every event and observation, and at its end.

It learns what each captured version's marker is and from then on compares labels with markers: tokens, engines,
batches. It is the run's event sink too, and keeps the ledger of samples. What it finds is one line in `violations`;
a run that obeys the laws leaves none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paceline.core.events import (
    Event,
    ReplicaChanged,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    SampleTrained,
    SyncCaptured,
    SyncCompleted,
    SyncConfirmed,
    TrainStep,
    ValidationFinished,
    ValidationSkipped,
)
from paceline.core.sample import Completion, TrainBatch
from paceline.testing.marker_model import marker_logprob, marker_token

IDLE_SECONDS = 8.0  # longer than any delay that faults make


class LawChecker:
    """Implements `core.events.EventSink`. `now` gives the time for its lines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.violations: list[str] = []
        self.events: list[Event] = []
        self.watchers: list[Callable[[Event], None]] = []
        self.ledger = SampleLedger(self._broken)
        self._marker: dict[int, int] = {}
        self._captured = -1
        self._published = -1
        self._queue_version = -1
        self._confirmed: dict[str, int] = {}
        self._ever_confirmed: set[tuple[str, int]] = set()
        self._state: dict[str, str] = {}
        self._requested: Counter[int] = Counter()
        self._recorded: Counter[int] = Counter()
        self._paused: set[str] = set()
        self._busy_since: dict[str, float] = {}
        self._judges: dict[type[Event], Callable[..., None]] = {
            SyncCaptured: self._on_captured,
            SyncConfirmed: self._on_confirmed,
            SyncCompleted: self._on_completed,
            ReplicaChanged: self._on_replica,
            ValidationFinished: self._on_validation,
            ValidationSkipped: self._on_validation,
            SampleAdmitted: self._on_admitted,
            SampleTrained: self._on_trained,
            SampleDropped: self.ledger.ended,
            SampleFailed: self.ledger.ended,
            TrainStep: self._on_step,
        }

    def emit(self, event: Event) -> None:
        """Keep and judge one event."""
        self.events.append(event)
        judge = self._judges.get(type(event))
        if judge is not None:
            judge(event)
        for watch in self.watchers:
            watch(event)

    @property
    def syncs(self) -> int:
        """Versions published so far."""
        return sum(isinstance(event, SyncCompleted) for event in self.events)

    # -- what a run shows beside its events --------------------------------------------------------------------------

    def snapshot(self, version: int, marker: int) -> None:
        """The trainer's snapshot of this version holds this marker."""
        self._marker[version] = marker

    def stepped(self, process: str, version: int | None, marker: int, weight: float) -> None:
        """An engine of a process made a step with these weights under this label (V1, V6, and the pause's barrier)."""
        if version is None or self._marker.get(version) != marker:
            self._broken("V1", f"{process} stepped under label {version} with marker {marker}")
        if weight != marker:
            self._broken("V6", f"{process} holds weights of {weight:g} beside marker {marker}")
        self._busy_since.pop(process, None)
        if process in self._paused:
            self._broken("pause", f"{process} made a step after its pause had returned")

    def has_work(self, process: str) -> None:
        """A replica says that it has work; unless it is paused it makes a step soon (L2)."""
        since = self._busy_since.setdefault(process, self._now())
        if self._now() - since > IDLE_SECONDS and process not in self._paused:
            self._broken(
                "L2", f"{process} has had work for {IDLE_SECONDS:g} s and makes no step, though nobody paused it"
            )
            self._busy_since[process] = self._now()

    def prefilled(self, process: str, used: set[int], held: int) -> None:
        """A prompt was prefilled from cache blocks of these markers while the engine held that one."""
        if used - {held}:
            self._broken("cache", f"{process} served blocks of {sorted(used)} under marker {held}")

    def received(self, process: str) -> None:
        """A replica (`replica-1#2` is the second process of that name) was sent requests (V5)."""
        if process.partition("#")[0] not in self._confirmed:
            self._broken("V5", f"{process} was sent requests before its first confirmed version")

    def finished(self, process: str, completion: Completion, pinned: int | None) -> None:
        """A replica finished a response: labels, markers and log-probs agree token by token (V4, V8)."""
        self._judge_tokens(f"{process}/{completion.request_id}", completion)
        if pinned is not None and set(completion.versions) - {pinned}:
            self._broken("pin", f"{completion.request_id} pinned {pinned} but holds {set(completion.versions)}")

    def batch(self, batch: TrainBatch) -> None:
        """The trainer makes an update of this batch (V8)."""
        for sequence in batch.sequences:
            for position, (token, logprob) in enumerate(
                zip(sequence.response_ids, sequence.rollout_logprobs, strict=True)
            ):
                marker = token // 1000
                if (token, logprob) != (marker_token(marker, position), marker_logprob(marker, position)):
                    self._broken("V8", f"trained token {token} at {position} with log-prob {logprob}")
            if len(sequence.loss_mask) != len(sequence.response_ids):
                self._broken("V4", f"a mask of {len(sequence.loss_mask)} for {len(sequence.response_ids)} tokens")

    def pause_returned(self, process: str) -> None:
        """`pause` has returned: no step from here on."""
        self._paused.add(process)

    def resume_began(self, process: str) -> None:
        """`resume` has been called, or the process is gone."""
        self._paused.discard(process)
        self._busy_since.pop(process, None)

    def queue_told(self, version: int) -> None:
        """The message queue learns a published version (V1, V2): somebody must serve it by then."""
        if not any(v == version for _, v in self._ever_confirmed):
            self._broken("V1", f"the queue learnt {version} before any replica confirmed it")
        if version <= self._queue_version:
            self._broken("V3", f"the queue learnt {version} after {self._queue_version}")
        self._queue_version = max(version, self._queue_version)

    def rollouter_told(self, confirmed: Mapping[str, int]) -> None:
        """The rollouter learns who serves what (V1)."""
        for replica, version in confirmed.items():
            if (replica, version) not in self._ever_confirmed:
                self._broken("V1", f"the rollouter was told that {replica} serves {version}, which it never confirmed")

    def validation_requested(self, version: int) -> None:
        """The rollouter was asked for a validation of this version."""
        self._requested[version] += 1

    def end(self, *, completed: bool) -> None:
        """The run is over; `completed`: it says that it did all it was asked for."""
        if not completed:
            return
        self.ledger.close()
        for version, count in self._requested.items():
            if self._recorded[version] != count:
                self._broken("validation", f"{self._recorded[version]} records of {count} validations of {version}")

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_captured(self, event: SyncCaptured) -> None:
        if event.version <= self._captured:
            self._broken("V3", f"captured {event.version} after {self._captured}")
        self._captured = event.version

    def _on_confirmed(self, event: SyncConfirmed) -> None:
        if event.version not in self._marker:
            self._broken("V1", f"{event.replica} confirmed {event.version}, which was never captured")
        self._confirmed[event.replica] = event.version
        self._ever_confirmed.add((event.replica, event.version))

    def _on_completed(self, event: SyncCompleted) -> None:
        if event.version <= self._published:
            self._broken("V3", f"published {event.version} after {self._published}")
        self._published = event.version
        for replica, state in self._state.items():
            if state == "ready" and self._confirmed.get(replica) != event.version:
                served = self._confirmed.get(replica)
                self._broken("V1", f"published {event.version} while {replica} is ready and serves {served}")

    def _on_replica(self, event: ReplicaChanged) -> None:
        self._state[event.replica] = event.state
        if event.state == "ready" and event.replica not in self._confirmed:
            self._broken("V5", f"{event.replica} became ready before it confirmed a version")
        if event.state in ("joining", "lost"):
            self._confirmed.pop(event.replica, None)

    def _on_validation(self, event: ValidationFinished | ValidationSkipped) -> None:
        self._recorded[event.version] += 1
        if self._recorded[event.version] > max(1, self._requested[event.version]):
            self._broken("validation", f"{self._recorded[event.version]} records of version {event.version}")

    def _on_admitted(self, event: SampleAdmitted) -> None:
        if not self._ever_confirmed:
            self._broken("V5", "a sample was admitted before the first confirmed version")
        self.ledger.admitted(event)

    def _on_trained(self, event: SampleTrained) -> None:
        self.ledger.ended(event)
        if any(lag < 0 for lag in event.lags):
            self._broken("V7", f"negative lag in {event.lags}")

    def _on_step(self, event: TrainStep) -> None:
        if event.version not in self._marker:
            self._broken("V7", f"step {event.step} says version {event.version}, which was never captured")

    def _judge_tokens(self, where: str, completion: Completion) -> None:
        if not len(completion.token_ids) == len(completion.logprobs) == len(completion.versions):
            self._broken("V4", f"{where}: tokens, log-probs and versions differ in length")
            return
        rows = zip(completion.token_ids, completion.logprobs, completion.versions, strict=True)
        for position, (token, logprob, version) in enumerate(rows):
            marker = self._marker.get(version, -1)
            if token != marker_token(marker, position) or logprob != marker_logprob(marker, position):
                self._broken("V4", f"{where}: token {token} at {position} is labelled {version} (marker {marker})")
                return

    def _broken(self, law: str, what: str) -> None:
        self.violations.append(f"{law} at {self._now():.3f} s: {what}")


class SampleLedger:
    """L1: what was admitted ends once. `in_flight` are the samples that have not ended."""

    def __init__(self, broken: Callable[[str, str], None]) -> None:
        self._broken = broken
        self._began: set[str] = set()
        self._ended: dict[str, str] = {}

    @property
    def in_flight(self) -> set[str]:
        """Admitted and not ended."""
        return self._began - self._ended.keys()

    def admitted(self, event: SampleAdmitted) -> None:
        """These samples begin."""
        for sample in event.ids:
            if sample in self._began:
                self._broken("L1", f"{sample} was admitted twice")
            self._began.add(sample)

    def ended(self, event: SampleTrained | SampleDropped | SampleFailed) -> None:
        """These samples end."""
        how = type(event).__name__
        for sample in event.ids:
            if sample in self._ended:
                self._broken("L1", f"{sample} ended as {how} after {self._ended[sample]}")
            elif sample not in self._began:
                self._broken("L1", f"{sample} ended as {how} and was never admitted")
            self._ended[sample] = how

    def close(self, left: Sequence[str] = ()) -> None:
        """A run that completed has nothing in flight but `left`."""
        lost = self.in_flight - set(left)
        if lost:
            self._broken("L1", f"{len(lost)} samples never ended: {sorted(lost)[:5]}")
