"""WeightTransaction: the replica's side of a sync.

Law: a version exists here only after its swap was confirmed (V1); no decode step sees half-applied weights (V6); what
comes late or belongs to another life is refused and changes nothing.

States: JOINING -> READY(v) -> UPDATING -> READY(w), or FENCED when neither the new nor the old version can be proved.
Staged weights lie beside the served ones until they are swapped in or discarded. `swap` must run between two decode
steps. Rollback is binding the version before, whose lease is held until the swap is proved: pointers again for a mapped
engine, a copy of all its bytes for one that owns its memory. Where such an engine was changed in place by a delta, the
change is subtracted first; it stays UPDATING until `audit` has hashed its memory, beside the decode loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.core.commands import ReplicaReport, ReplicaState, StageCommand, StageReport, SwapCommand
from paceline.core.errors import DigestMismatch, LateCommand, PacelineError, SyncError, VersionError
from paceline.core.ports import Clock, InferenceEngine
from paceline.core.version import Version
from paceline.core.weight_ports import ServingBoard, StagedWeights, WeightReceiver
from paceline.sync.covered_weights import CoveredWeights
from paceline.sync.in_place_change import InPlaceChange, in_place_change
from paceline.sync.proved_fill import proved_fill
from paceline.sync.served_proof import strided_memory, wrong_tensors
from paceline.weights.coverage import CoveragePlanner, CoverageRules

T = TypeVar("T")
_log = logging.getLogger(__name__)


class WeightTransaction:
    """The versions one replica holds: the served one and the staged ones.

    `rules` say how sent names become the engine's; without them names are equal and nothing is without a partner.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        life: int,
        receiver: WeightReceiver,
        board: ServingBoard,
        clock: Clock,
        rules: CoverageRules | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._life = life
        self._receiver = receiver
        self._board = board
        self._clock = clock
        self._coverage = CoveragePlanner(CoverageRules() if rules is None else rules)
        self._state: ReplicaState = "joining"
        self._serving: CoveredWeights | None = None
        self._unproved: CoveredWeights | None = None  # what was served before a change in place that is not proved yet
        self._staged: dict[int, CoveredWeights] = {}
        self._staged_lock = threading.Lock()  # staging runs in a worker thread beside the decode loop

    @property
    def state(self) -> ReplicaState:
        """Where this replica stands."""
        return self._state

    @property
    def serving(self) -> StagedWeights | None:
        """The confirmed weights, None before the first."""
        return self._serving

    def report(self) -> ReplicaReport:
        """The state as others see it."""
        serving = self._serving
        version = serving.manifest.version if serving else None
        digest = serving.manifest.digest if serving else ""
        return ReplicaReport(replica=self._replica_id, state=self._state, version=version, digest=digest)

    def stage(self, command: StageCommand, engine: InferenceEngine) -> StageReport:
        """Fetch and verify a version beside the served one; runs in a worker thread. The engine is only asked what it
        expects and, if it copies, how its memory is laid out.

        Raises:
            CoverageError: what was sent does not cover the engine; nothing was fetched.
            LateCommand, VersionError, SyncError: nothing has changed here.
        """
        manifest = command.manifest
        self._refuse_late(manifest.version, command.deadline_wall)
        self.audit(engine)  # a swap whose caller has left may have ended without it
        if self._serving is not None and manifest.version <= self._serving.manifest.version:
            served = Version.unpack(self._serving.manifest.version)
            raise VersionError(f"{self._replica_id} serves {served}; {Version.unpack(manifest.version)} is not newer")
        began = self._clock.now()
        plan = self._coverage.plan(manifest, engine.expected_tensors(), engine.expected_ties(), strided_memory(engine))
        # What is FENCED comes back by a full version alone.
        base = None if self._serving is None or self._state == "fenced" else self._serving.sent
        fetched = self._named("staging", lambda: self._receiver.stage(manifest, base, engine.apply))
        staged = CoveredWeights(fetched, plan)
        try:
            self._refuse_late(manifest.version, command.deadline_wall)
        except LateCommand:  # nobody waits for it or will discard it: it would keep its lease for ever
            staged.release()
            raise
        with self._staged_lock:
            previous = self._staged.pop(manifest.version, None)
            self._staged[manifest.version] = staged
        if previous is not None:
            previous.release()
        seconds = self._clock.now() - began
        return StageReport(
            replica=self._replica_id,
            version=manifest.version,
            digest=staged.digest,
            seconds=seconds,
            bytes=staged.taken_bytes,
            base_version=staged.base_version,
        )

    def swap(self, command: SwapCommand, engine: InferenceEngine) -> StagedWeights | None:
        """Serve the staged version from the next step on; returns the weights served before, to be released by the
        caller once nobody uses them.

        Raises:
            SyncError: the engine refused or could not be proved to serve the version. It serves the old version
            again, or,
                where that cannot be proved either, the replica is FENCED.
        """
        self._refuse_late(command.version, command.deadline_wall)
        with self._staged_lock:
            staged = self._staged.get(command.version)
        if staged is None:
            raise SyncError(f"{self._replica_id}: version {Version.unpack(command.version)} is not staged")
        previous = self._serving
        if previous is not None and command.version <= previous.manifest.version:
            served = Version.unpack(previous.manifest.version)
            raise VersionError(f"{self._replica_id} serves {served}; {Version.unpack(command.version)} is not newer")
        if engine.apply == "copied":
            self._named("withdrawing the table of", self._board.withdraw)
        served_well = self._state == "ready"
        self._state = "updating"
        change: InPlaceChange | None = None
        try:
            if served_well and previous is not None:
                change = self._named("looking at", lambda: in_place_change(engine, staged, previous))
            self._move(engine, staged, change)
        except PacelineError:
            self._restore(engine, previous, change)
            self._announce_again(engine)
            raise
        with self._staged_lock:
            del self._staged[command.version]
        self._serving = staged
        if change is None:
            self._state = "ready"
        else:
            self._unproved = previous
        return previous

    def _move(self, engine: InferenceEngine, staged: CoveredWeights, change: InPlaceChange | None) -> None:
        if change is not None:
            self._named("changing in place", change.apply)
            return
        fill = self._named("looking at", lambda: proved_fill(engine, staged))
        if fill is not None:
            self._named("copying", fill.apply)
            return
        self._named("binding", lambda: engine.bind(staged.tensors, staged.manifest.version))
        self._prove(engine, staged)

    def audit(self, engine: InferenceEngine) -> None:
        """Prove what the last swap has changed in place, if it has: hashes the engine's memory, in a worker thread.

        Raises:
            DigestMismatch: it is not the version; the replica is FENCED and takes the version before for its last one.
        """
        previous, serving = self._unproved, self._serving
        if previous is None or serving is None:
            return
        self._unproved = None
        try:
            self._named("proving", lambda: self._prove(engine, serving))
        except PacelineError:
            self._serving = previous
            self._state = "fenced"
            serving.release()
            raise
        serving.drop_change()
        self._state = "ready"

    def announce(self, engine: InferenceEngine) -> None:
        """Tell processes outside what is served; after the swap, not in the pause."""
        if self._serving is not None:
            manifest = self._serving.manifest
            served = self._serving.served_as_sent(engine.served_tensors())
            self._board.publish(manifest.version, manifest.digest, manifest, served)

    def _announce_again(self, engine: InferenceEngine) -> None:
        """After a roll-back: what was served before is served again."""
        if engine.apply == "copied" and self._state == "ready":
            try:
                self._named("announcing", lambda: self.announce(engine))
            except PacelineError as error:  # the swap's own error is the one to tell; nothing false is said
                _log.warning("serving.not_announced: %s", error.message)

    def discard(self, version: int) -> None:
        """Forget a staged version; unknown ones are ignored."""
        with self._staged_lock:
            staged = self._staged.pop(version, None)
        if staged is not None:
            staged.release()

    def close(self) -> None:
        """Release everything."""
        with self._staged_lock:
            held = list(self._staged.values())
            self._staged.clear()
        for staged in held:
            staged.release()
        if self._serving is not None:
            self._serving.release()
            self._serving = None
        self._receiver.close()

    def _restore(
        self, engine: InferenceEngine, previous: CoveredWeights | None, change: InPlaceChange | None = None
    ) -> None:
        if previous is None:
            self._state = "joining"
            return
        if change is not None:
            try:
                self._named("taking back", change.take_back)
                self._prove(engine, previous)
            except PacelineError:
                pass  # all its bytes are copied back then
            else:
                self._state = "ready"
                return
        try:
            self._named("rolling back", lambda: engine.bind(previous.tensors, previous.manifest.version))
            self._prove(engine, previous)
        except PacelineError:
            self._state = "fenced"
        else:
            self._state = "ready"

    def _prove(self, engine: InferenceEngine, staged: CoveredWeights) -> None:
        wrong = wrong_tensors(engine, staged)
        if wrong:
            names = ", ".join(sorted(wrong)[:8])
            raise DigestMismatch(f"{self._replica_id} does not serve the staged bytes of {len(wrong)} tensors: {names}")

    def _named(self, doing: str, call: Callable[[], T]) -> T:
        """Engines and receivers are foreign code: whatever they raise becomes an error of a sync, with names."""
        try:
            return call()
        except PacelineError:
            raise
        except Exception as error:  # a sync must end for all sides, whatever the engine's library throws
            raise SyncError(f"{self._replica_id} failed {doing} weights: {type(error).__name__}: {error}") from error

    def _refuse_late(self, version: int, deadline_wall: float) -> None:
        life = Version.unpack(version).life
        if life != self._life:
            raise LateCommand(f"{self._replica_id} lives in life {self._life}; a command of life {life} is refused")
        if self._clock.wall() > deadline_wall:
            raise LateCommand(f"{self._replica_id}: a command for {Version.unpack(version)} came after its deadline")
