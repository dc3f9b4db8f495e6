"""ServedReplica: a replica whose engine is a server (`core.server_ports`); what `Replica` is for an engine in-process.

consumes: requests (`exchange`), stage / swap / pin / pause commands; produces: completions; waits for: the server;
unblocked by: its tokens and answers, `close`.

A swap: new streams wait; streams are frozen, closed, or (partial_rollout=false) drained within a deadline; the server
pauses, loads, proves; then everything goes on under the new version, also after an error, as long as it is known
what is served. A pinned version stays: the swap waits for the end of the pin, within its deadline. A server that is
gone, or serves weights that nobody confirmed, ends `run` with its name: it is started or met again, and gets a full
snapshot before its first request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from paceline.core.checkpoint_ports import NoJournal, TokenJournal
from paceline.core.commands import (
    ExchangeReply,
    ExchangeRequest,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
)
from paceline.core.errors import DeadlineExceeded, LateCommand, PacelineError, SyncError, WorkerDied
from paceline.core.events import EventSink, ForeignRequestsMixed, ResponsesAborted
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.server_ports import InferenceServer
from paceline.core.version import Version
from paceline.rollout.generation_meter import GenerationMeter
from paceline.rollout.outbox import Outbox
from paceline.rollout.served_streams import LabelReader, ServedStreams
from paceline.rollout.served_weights import ServedWeights

LOOK_SECONDS = 1.0  # how often the server is asked what it serves
SWAP_SHARE = 0.5  # of the time to a swap's deadline that a drain or a pin may take


class ServedReplica:
    """One replica over one server; `run` watches over it, everything else is called from outside meanwhile."""

    def __init__(
        self,
        *,
        replica_id: str,
        life: int,
        server: InferenceServer,
        read_label: LabelReader,
        partial_rollout: bool,
        drain_seconds: float,
        clock: Clock,
        events: EventSink,
        journal: TokenJournal | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._server = server
        self._partial_rollout = partial_rollout
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._events = events
        self._journal = journal or NoJournal()
        self._weights = ServedWeights(server, replica_id=replica_id, life=life, clock=clock)
        self._outbox = Outbox(clock=clock)
        self._meter = GenerationMeter(replica_id=replica_id, clock=clock, events=events)
        self._streams = ServedStreams(
            server,
            replica_id=replica_id,
            journal=self._journal,
            read_label=read_label,
            on_done=self._outbox.put,
            on_tokens=self._count,
            on_lost=self._lose,
        )
        self._known: set[str] = set()
        self._pinned: set[int] = set()
        self._unpinned = asyncio.Event()
        self._turn = asyncio.Lock()  # a swap, or a look at what is served
        self._stands_still = False
        self._swapping = False
        self._closing = False
        self._ended = asyncio.Event()
        self._lost: PacelineError | None = None
        self._counted_at = clock.now()

    @property
    def replica_id(self) -> str:
        """Name of this replica, for example `replica-0`."""
        return self._replica_id

    @property
    def swapping(self) -> bool:
        """Whether a swap keeps the server from making tokens now."""
        return self._swapping

    async def run(self) -> None:
        """Watch over the server until `close`.

        Raises:
            WorkerDied: it is gone, hangs, or serves weights that nobody confirmed.
        """
        looking = asyncio.ensure_future(self._look_after())
        try:
            await self._ended.wait()
        finally:
            self._closing = True
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self._meter.flush(self._streams)
            self._journal.close()
            await self._streams.take_out(self._streams.ids())
            await self._server.close()
        if self._lost is not None:
            raise WorkerDied(self._lost.message, self._replica_id) from self._lost

    async def close(self) -> None:
        """End `run` and let go of the server."""
        self._closing = True
        self._ended.set()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """New requests in, finished completions out; a request that is known already is not taken twice.

        Raises:
            SyncError: a live request before the first confirmed version, or a pinned one whose version is not pinned.
            WorkerDied: the server is gone, or the replica is closing.
        """
        self._refuse_when_closing()
        acknowledged = [done.request_id for done in self._outbox.acknowledge(request.acknowledged)]
        if acknowledged:
            self._known.difference_update(acknowledged)
            self._journal.forget(acknowledged)
        fresh = {r.request_id: r for r in request.requests if r.request_id not in self._known}.values()
        for one in fresh:
            if one.pinned_version is None and self._weights.serving is None:
                raise SyncError(f"{self._replica_id} has no confirmed version yet; requests are refused")
            if one.pinned_version is not None and one.pinned_version not in self._pinned:
                raise SyncError(f"{self._replica_id} has not pinned version {one.pinned_version}")
        self._known.update(one.request_id for one in fresh)
        self._journal.begin([one for one in fresh if one.pinned_version is None])
        self._streams.send(list(fresh))
        if request.aborted:
            await self._streams.take_out(request.aborted)
            self._known.difference_update(request.aborted)
            self._journal.forget(request.aborted)
        number, completions = await self._outbox.collect(request.wait_seconds)
        return ExchangeReply(
            batch=number, completions=completions, running=self._streams.running, waiting=self._streams.waiting
        )

    def _count(self, tokens: int, pinned: bool) -> None:
        now = self._clock.now()
        self._meter.step(
            seconds=now - self._counted_at,
            tokens=0 if pinned else tokens,
            validation_tokens=tokens if pinned else 0,
            live=self._streams,
        )
        self._counted_at = now

    # -- weights -------------------------------------------------------------------------------------------------------

    async def stage(self, command: StageCommand) -> StageReport:
        """Stage a version beside generation."""
        self._refuse_when_closing()
        try:
            return await self._weights.stage(command)
        except WorkerDied as error:
            self._lose(error)
            raise

    async def swap(self, command: SwapCommand) -> SwapReport:
        """Pause, load, prove, resume.

        Raises:
            PacelineError: the version before is served again, or the replica is FENCED.
        """
        self._refuse_when_closing()
        async with self._turn:
            manifest = self._weights.staged(command)
            await self._until_unpinned(command)
            if self._weights.serving is not None and self._weights.state == "ready":
                await self._check_label(self._weights.serving.version)
            self._streams.hold()
            try:
                await self._clear_way(command.deadline_wall)
                self._weights.refuse(command.version, command.deadline_wall)
                pause_seconds = await self._swap_in(manifest, command.deadline_wall)
            finally:
                self._go_on()
        return SwapReport(
            replica=self._replica_id, version=manifest.version, digest=manifest.digest, pause_seconds=pause_seconds
        )

    async def discard_staged(self, version: int) -> None:
        """Forget a staged version."""
        await self._weights.discard(version)

    async def report(self) -> ReplicaReport:
        """State, confirmed version and its digest."""
        return self._weights.report()

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Keep serving this version until `unpin`; False when it is not the one served now.

        Raises:
            LateCommand: it is past the deadline; nobody would unpin it.
        """
        if deadline_wall is not None and self._clock.wall() > deadline_wall:
            raise LateCommand(f"{self._replica_id}: a pin of {Version.unpack(version)} came after its deadline")
        report = self._weights.report()
        if report.version != version or report.state != "ready":
            return False
        self._pinned.add(version)
        return True

    async def unpin(self, version: int) -> None:
        """End a pin; harmless when there is none. What it still has is given back as aborted."""
        if version in self._pinned:
            self._pinned.discard(version)
            self._unpinned.set()
            self._outbox.put(await self._streams.take_out(self._streams.pinned_ids(version)))

    async def pause(self) -> None:
        """After this the server makes no token until `resume`; pausing twice is harmless."""
        self._refuse_when_closing()
        async with self._turn:
            self._stands_still = True
            self._streams.hold()
            await self._still(self._clock.wall() + self._drain_seconds)

    async def resume(self) -> None:
        """Go on; resuming twice is harmless."""
        self._refuse_when_closing()
        async with self._turn:
            if self._stands_still:
                self._stands_still = False
                await self._server.resume()
            self._go_on()

    # -- one swap ------------------------------------------------------------------------------------------------------

    async def _until_unpinned(self, command: SwapCommand) -> None:
        seconds = (command.deadline_wall - self._clock.wall()) * SWAP_SHARE
        ends = self._clock.now() + seconds
        while self._pinned:
            if self._clock.now() >= ends:
                pinned = ", ".join(str(Version.unpack(version)) for version in sorted(self._pinned))
                raise SyncError(f"{self._replica_id} serves {pinned} to a validation, which did not end in time")
            self._unpinned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ends - self._clock.now()):
                    await self._unpinned.wait()

    async def _clear_way(self, deadline_wall: float) -> None:
        """Sequences in flight end under their version, or are given back, where they may not go on under another."""
        if self._partial_rollout or self._stands_still:
            return
        await self._streams.close_unbegun()
        seconds = min(self._drain_seconds, (deadline_wall - self._clock.wall()) * SWAP_SHARE)
        try:
            async with asyncio.timeout(seconds):
                await self._streams.all_ended()
        except TimeoutError:
            aborted = await self._streams.take_out(self._streams.open_ids())
            reason = f"not ended within {seconds:g} s before the swap"
            self._events.emit(
                ResponsesAborted(replica=self._replica_id, requests=[one.request_id for one in aborted], reason=reason)
            )
            self._outbox.put(aborted)

    async def _swap_in(self, manifest: WeightManifest, deadline_wall: float) -> float:
        began = self._clock.now()
        was_paused = self._stands_still
        self._swapping = True
        try:
            await self._still(deadline_wall)
            await self._weights.load(manifest)
        except (WorkerDied, DeadlineExceeded) as error:
            self._weights.fence()
            self._lose(error)
            raise
        finally:
            if not was_paused and self._weights.state != "fenced" and self._lost is None:
                await self._server.resume()
            self._swapping = False
        return self._clock.now() - began

    async def _still(self, deadline_wall: float) -> None:
        if self._server.streams == "closed":
            await self._streams.close()
        mixed = await self._server.pause(deadline_wall)
        if mixed:
            self._events.emit(ForeignRequestsMixed(replica=self._replica_id, requests=mixed))

    def _go_on(self) -> None:
        serving = self._weights.serving
        if serving is not None and self._weights.state == "ready" and not self._stands_still and self._lost is None:
            self._streams.go_on(serving.version)

    # -- the server ----------------------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            async with self._turn:
                serving = self._weights.serving
                if serving is None or self._weights.state != "ready":
                    continue
                try:
                    await self._check_label(serving.version)
                except PacelineError as error:
                    self._lose(error)
                    return

    async def _check_label(self, version: int) -> None:
        """Raises WorkerDied: the server says that it serves something else."""
        served = await self._server.weight_version()
        if served != version:
            self._weights.fence()
            said = "weights of its own" if served is None else f"version {Version.unpack(served)}"
            line = f"{self._replica_id}: the server serves {said}, confirmed is {Version.unpack(version)}"
            error = WorkerDied(f"{line}; it was started again or somebody else loads weights", self._replica_id)
            self._lose(error)
            raise error

    def _lose(self, error: PacelineError) -> None:
        if self._lost is None and not self._closing:
            self._lost = error
            self._ended.set()

    def _refuse_when_closing(self) -> None:
        if self._lost is not None:
            raise WorkerDied(self._lost.message, self._replica_id)
        if self._closing:
            raise WorkerDied(f"{self._replica_id} is closing", self._replica_id)
