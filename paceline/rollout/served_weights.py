"""ServedWeights: a replica's side of a sync where the server loads versions by itself.

    JOINING -> READY(v) -> UPDATING -> READY(w) | FENCED

Law: a version exists here only after every worker of the server has said what entered its model and that is what was
published (V1). A load that fails is undone by loading the version before, which the workers still hold, and proving
it; where that fails too, the replica is FENCED and makes no token until a full snapshot is confirmed. What comes late
or belongs to another life is refused and changes nothing.
"""

from __future__ import annotations

from paceline.core.commands import ReplicaReport, ReplicaState, StageCommand, StageReport, SwapCommand
from paceline.core.errors import LateCommand, PacelineError, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.server_ports import InferenceServer
from paceline.core.version import Version


class ServedWeights:
    """The versions of one server, as its replica knows them."""

    def __init__(self, server: InferenceServer, *, replica_id: str, life: int, clock: Clock) -> None:
        self._server = server
        self._replica_id = replica_id
        self._life = life
        self._clock = clock
        self._state: ReplicaState = "joining"
        self._serving: WeightManifest | None = None
        self._staged: dict[int, WeightManifest] = {}

    @property
    def state(self) -> ReplicaState:
        """Where this replica stands."""
        return self._state

    @property
    def serving(self) -> WeightManifest | None:
        """The confirmed version, None before the first."""
        return self._serving

    def report(self) -> ReplicaReport:
        """The state as others see it."""
        version = self._serving.version if self._serving else None
        digest = self._serving.digest if self._serving else ""
        return ReplicaReport(replica=self._replica_id, state=self._state, version=version, digest=digest)

    async def stage(self, command: StageCommand) -> StageReport:
        """Have every worker hold the version beside what is served.

        Raises:
            LateCommand, VersionError, SyncError: refused; nothing has changed.
        """
        manifest = command.manifest
        self.refuse(manifest.version, command.deadline_wall)
        began = self._clock.now()
        held = await self._server.stage(manifest, command.deadline_wall)
        try:
            self.refuse(manifest.version, command.deadline_wall)
        except PacelineError:  # nobody waits for it or will discard it: it would be held for ever
            await self._server.discard(manifest.version)
            raise
        self._staged[manifest.version] = manifest
        return StageReport(
            replica=self._replica_id,
            version=manifest.version,
            digest=held.digest,
            seconds=self._clock.now() - began,
            bytes=held.bytes,
            base_version=held.base_version,
        )

    def staged(self, command: SwapCommand) -> WeightManifest:
        """What the command wants to be served.

        Raises:
            LateCommand, VersionError: refused. SyncError: it is not staged.
        """
        self.refuse(command.version, command.deadline_wall)
        manifest = self._staged.get(command.version)
        if manifest is None:
            raise SyncError(f"{self._replica_id}: version {Version.unpack(command.version)} is not staged")
        return manifest

    async def load(self, manifest: WeightManifest) -> None:
        """Load and prove a staged version; within a pause.

        Raises:
            PacelineError: the version before is served again, or the replica is FENCED.
        """
        self._state = "updating"
        try:
            await self._server.load(manifest.version)
            await self._server.confirm(manifest.version, manifest.digest)
        except PacelineError:
            await self._restore()
            raise
        self._staged.pop(manifest.version, None)
        self._serving = manifest
        self._state = "ready"

    async def discard(self, version: int) -> None:
        """Forget a staged version; unknown ones are ignored."""
        if self._staged.pop(version, None) is not None:
            await self._server.discard(version)

    def fence(self) -> None:
        """Nobody knows any more what is served."""
        self._state = "fenced"

    def refuse(self, version: int, deadline_wall: float) -> None:
        """Raise LateCommand or VersionError for what may not be done any more."""
        life = Version.unpack(version).life
        if life != self._life:
            raise LateCommand(f"{self._replica_id} lives in life {self._life}; a command of life {life} is refused")
        if self._clock.wall() > deadline_wall:
            raise LateCommand(f"{self._replica_id}: a command for {Version.unpack(version)} came after its deadline")
        # A fenced replica does not know what it serves: the version that it had may be loaded again.
        known = self._serving if self._state != "fenced" else None
        if known is not None and version <= known.version:
            served = Version.unpack(known.version)
            raise VersionError(f"{self._replica_id} serves {served}; {Version.unpack(version)} is not newer")

    async def _restore(self) -> None:
        if self._serving is None:
            self._state = "joining"
            return
        try:
            await self._server.load(self._serving.version)
            await self._server.confirm(self._serving.version, self._serving.digest)
        except PacelineError:
            self._state = "fenced"
        else:
            self._state = "ready"
