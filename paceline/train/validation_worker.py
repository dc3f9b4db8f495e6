"""ValidationWorker: the trainer's side of a validation, beside the updates and never in their way.

It generates its share with an engine of its own, from the snapshot of exactly the version that is asked for: leased or
fetched as a replica does it, verified, bound and proved; never the weights that the optimiser is changing. It runs in
a process of its own on the trainer's node. What it holds it holds for one validation only.

consumes: requests; produces: their completions; waits for: the manifest of the version, its own work; whoever asked
has a deadline, and the worker keeps it too, since nobody would take what comes later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.core.commands import StageCommand, SwapCommand
from paceline.core.errors import DeadlineExceeded, LateCommand
from paceline.core.events import EventSink
from paceline.core.ports import VALIDATOR, Clock, InferenceEngine, SnapshotSource, Work
from paceline.core.sample import Completion, GenerationRequest
from paceline.core.version import Version
from paceline.core.waits import Waits
from paceline.core.weight_ports import WeightTransactionPort


class ValidationWorker:
    """Implements `core.ports.TrainerSide`. `make_transaction` gives each validation a transaction of its own, so
    that no version stays leased between two of them.
    """

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        make_transaction: Callable[[], WeightTransactionPort],
        snapshots: SnapshotSource,
        work: Work,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._engine = engine
        self._make_transaction = make_transaction
        self._snapshots = snapshots
        self._work = work
        self._clock = clock
        self._waits = Waits(who=VALIDATOR, clock=clock, events=events)
        self._turn = asyncio.Lock()

    async def generate(
        self, version: int, requests: Sequence[GenerationRequest], deadline_wall: float
    ) -> list[Completion]:
        """The responses to these requests under this version (packed), in any order.

        Raises:
            LateCommand, DeadlineExceeded: it is past `deadline_wall` (unix seconds).
            SyncError and its kin: the snapshot is gone, or could not be staged, bound or proved.
        """
        async with self._turn:
            self._refuse_late(version, deadline_wall)
            transaction = self._make_transaction()
            try:
                await self._bind(version, deadline_wall, transaction)
                return await self._decode(requests, deadline_wall)
            finally:
                self._engine.unbind()
                transaction.close()

    async def _bind(self, version: int, deadline_wall: float, transaction: WeightTransactionPort) -> None:
        manifest = await self._waits.bounded(
            self._snapshots.captured_manifest(version),
            seconds=deadline_wall - self._clock.wall(),
            what="the manifest of its version",
            culprit="trainer",
        )
        stage = StageCommand(manifest=manifest, sync_id=0, deadline_wall=deadline_wall)
        await self._work.run(lambda: transaction.stage(stage, self._engine))
        swap = SwapCommand(version=version, sync_id=0, deadline_wall=deadline_wall)
        await self._work.run(lambda: transaction.swap(swap, self._engine))

    async def _decode(self, requests: Sequence[GenerationRequest], deadline_wall: float) -> list[Completion]:
        engine = self._engine
        engine.add(requests)
        done: list[Completion] = []
        while engine.running + engine.waiting > 0:
            if self._clock.wall() > deadline_wall:
                line = f"{VALIDATOR} has made {len(done)} of {len(requests)} responses at the deadline"
                raise DeadlineExceeded(line, VALIDATOR, 0.0)
            done.extend(await self._work.run(engine.step))
            await asyncio.sleep(0)
        return done

    def _refuse_late(self, version: int, deadline_wall: float) -> None:
        if self._clock.wall() > deadline_wall:
            raise LateCommand(f"{VALIDATOR}: a validation of {Version.unpack(version)} came after its deadline")
