"""Replica: the decode loop of one inference replica.

consumes: requests (`exchange`), stage / swap / pin / pause commands; produces: completions; waits for: requests,
`resume`; unblocked by: `exchange`, `swap`, `resume`, `close`.

Law: everything that changes what a decode step may see (swap, pause, pin) runs *between* two steps, in the loop's own
task or, where a swap is due, in the thread that decodes. So after `pause()` returned no step runs until `resume()`, and
no step sees half-applied weights (V6). Live requests are refused before the first confirmed version (V5).

Sessions: the live engine serves the newest version; with `partial_rollout` off a swap leaves sequences in flight to a
draining session on their old version; a pinned session serves one version for a validation. Each holds its weights'
lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from paceline.core.errors import ConfigError, LateCommand, PacelineError, SyncError, WorkerDied
from paceline.core.events import EventSink, ResponsesAborted
from paceline.core.ports import Clock, InferenceEngine, Work
from paceline.core.sample import Completion, GenerationRequest
from paceline.core.version import Version
from paceline.core.weight_ports import StagedWeights, WeightTransactionPort
from paceline.rollout.between_steps import BetweenSteps, Request
from paceline.rollout.generation_meter import GenerationMeter
from paceline.rollout.outbox import Outbox
from paceline.rollout.session import Session
from paceline.rollout.step_swap import StepSwap

T = TypeVar("T")


class Replica:
    """One replica; `run` is its loop, everything else is called from outside while it runs."""

    def __init__(
        self,
        *,
        replica_id: str,
        make_engine: Callable[[], InferenceEngine],
        transaction: WeightTransactionPort,
        partial_rollout: bool,
        drain_seconds: float,
        decode_work: Work,
        stage_work: Work,
        clock: Clock,
        events: EventSink,
        journal: TokenJournal | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._journal = journal or NoJournal()
        self._make_engine = make_engine
        self._transaction = transaction
        self._partial_rollout = partial_rollout
        self._drain_seconds = drain_seconds
        self._decode_work = decode_work
        self._stage_work = stage_work
        self._clock = clock
        self._events = events
        self._live = Session(engine=make_engine(), staged=None, pinned=False)
        self._draining: list[Session] = []
        self._pinned: dict[int, Session] = {}
        self._idle_engines: list[InferenceEngine] = []
        self._between = BetweenSteps()
        self._wake = asyncio.Event()
        self._paused = False
        self._closing = False
        self._turn = 0
        self._last_step_ended = float("-inf")
        self._due: Request | None = None
        self._known: set[str] = set()
        self._outbox = Outbox(clock=clock)
        self._meter = GenerationMeter(replica_id=replica_id, clock=clock, events=events)

    @property
    def replica_id(self) -> str:
        """Name of this replica, for example `replica-0`."""
        return self._replica_id

    async def run(self) -> None:
        """Decode until `close`. An engine's error ends the loop and reaches the caller; waiting commands are failed."""
        try:
            while not self._closing:
                self._due = None  # no step runs: it is done here
                self._between.run_all()
                self._end_overdue_drains()
                session = None if self._paused else self._next_session()
                if session is None:
                    self._wake.clear()
                    if not self._between and not self._closing:
                        await self._wake.wait()
                    continue
                await self._step(session)
            self._meter.flush(self._live.engine)
        finally:
            self._closing = True
            self._journal.close()
            self._fail_commands()

    async def close(self) -> None:
        """End the loop and release all weights."""
        self._closing = True
        self._wake.set()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """New requests in, finished completions out; a request that is known already is not taken twice.

        Raises:
            SyncError: a live request before the first confirmed version, or a pinned one whose version is not pinned.
            WorkerDied: the replica is closing.
        """
        self._refuse_when_closing()
        acknowledged = [done.request_id for done in self._outbox.acknowledge(request.acknowledged)]
        if acknowledged:
            self._known.difference_update(acknowledged)
            self._journal.forget(acknowledged)
        unknown = {r.request_id: r for r in request.requests if r.request_id not in self._known}
        self._accept(list(unknown.values()))
        if request.aborted:
            await self._between_steps(lambda: self._abort_now(request.aborted))
        number, completions = await self._outbox.collect(request.wait_seconds)
        sessions = self._sessions()
        return ExchangeReply(
            batch=number,
            completions=completions,
            running=sum(s.engine.running for s in sessions),
            waiting=sum(s.engine.waiting for s in sessions),
        )

    def _accept(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            if request.pinned_version is None and self._live.staged is None:
                raise SyncError(f"{self._replica_id} has no confirmed version yet; requests are refused")
            if request.pinned_version is not None and request.pinned_version not in self._pinned:
                raise SyncError(f"{self._replica_id} has not pinned version {request.pinned_version}")
        self._known.update(request.request_id for request in requests)
        live = [r for r in requests if r.pinned_version is None]
        if live:
            self._journal.begin(live)  # before the engine, which may make a token of them at once
            self._add(self._live, live)
        for version, session in self._pinned.items():
            mine = [r for r in requests if r.pinned_version == version]
            if mine:
                self._add(session, mine)
        if requests:
            self._wake.set()

    def _add(self, session: Session, requests: list[GenerationRequest]) -> None:
        """Queue requests; one that the engine cannot run comes back with the reason, alone."""
        try:
            session.engine.add(requests)
        except ConfigError as error:
            if len(requests) > 1:
                for request in requests:
                    self._add(session, [request])
                return
            self._outbox.put([Completion(requests[0].request_id, [], [], [], "error", error.message)])
        else:
            session.requests.update(request.request_id for request in requests)

    async def _step(self, session: Session) -> None:
        began = self._clock.now()
        before = session.engine.tokens_generated
        loop = asyncio.get_running_loop()
        finished = await self._decode_work.run(lambda: self._decode(session, loop))
        self._last_step_ended = self._clock.now()
        tokens = session.engine.tokens_generated - before
        self._meter.step(
            seconds=self._last_step_ended - began,
            tokens=0 if session.pinned else tokens,
            validation_tokens=tokens if session.pinned else 0,
            live=self._live.engine,
        )
        session.requests.difference_update(completion.request_id for completion in finished)
        self._outbox.put(finished)
        if session in self._draining and not session.has_work:
            self._draining.remove(session)
            self._retire(session)
        await asyncio.sleep(0)  # commands and exchanges get their turn between two steps

    def _abort_now(self, request_ids: Sequence[str]) -> None:
        """Take these out for good; one that is finished already stays in the outbox, and is not read."""
        gone: set[str] = set()
        for session in self._sessions():
            mine = session.requests.intersection(request_ids)
            session.engine.abort(sorted(mine))
            session.requests -= mine
            gone |= mine
            if session in self._draining and not session.has_work:
                self._draining.remove(session)
                self._retire(session)
        self._known -= gone
        self._journal.forget(sorted(gone))
        if gone:
            reason = "not wanted any more"
            self._events.emit(ResponsesAborted(replica=self._replica_id, requests=sorted(gone), reason=reason))

    def _decode(self, session: Session, loop: asyncio.AbstractEventLoop) -> list[Completion]:
        """A step; where a swap is due after it, that, and where it is settled by that, the step after it."""
        finished = self._decode_once(session)
        due = self._due
        if due is None or due.swap is None or session is not self._live or not due.is_wanted:
            return finished
        due.swap.make(self._clock.now())
        if due.swap.went_well and self._transaction.report().state == "ready" and session.has_work:
            loop.call_soon_threadsafe(self._between.run, due)
            finished += self._decode_once(session)
        return finished

    def _decode_once(self, session: Session) -> list[Completion]:
        finished = session.engine.step()
        made = session.engine.last_step
        if made is not None and not session.pinned:
            self._journal.append(made)
        return finished

    def _next_session(self) -> Session | None:
        fenced = self._transaction.report().state == "fenced"  # nobody knows what the live engine serves
        busy = [s for s in self._sessions() if s.has_work and not (fenced and s is self._live)]
        if not busy:
            return None
        self._turn += 1
        return busy[self._turn % len(busy)]

    def _sessions(self) -> list[Session]:
        return [self._live, *self._draining, *self._pinned.values()]

    # -- weights -------------------------------------------------------------------------------------------------------

    async def stage(self, command: StageCommand) -> StageReport:
        """Stage a version beside generation."""
        engine = self._live.engine
        return await self._stage_work.run(lambda: self._transaction.stage(command, engine))

    async def swap(self, command: SwapCommand) -> SwapReport:
        """Pause between two steps, swap, prove, resume."""
        swap = StepSwap(lambda: self._transaction.swap(command, self._live.engine), self._clock)
        asked = self._ask(lambda: self._swap_now(command, swap), swap)
        if self._partial_rollout:
            self._due = asked
        report: SwapReport
        report, rest = await asked.done
        await asyncio.shield(rest)
        return report

    async def _finish_swap(self, previous: StagedWeights | None, is_proved: bool) -> None:
        """What need not be done in the pause; whoever asked may have left."""
        engine = self._live.engine
        if not is_proved:
            await self._prove(engine)
        await self._stage_work.run(lambda: self._transaction.announce(engine))
        if previous is not None and self._is_unused(previous):
            await self._stage_work.run(previous.release)  # unmapping takes milliseconds

    async def _prove(self, engine: InferenceEngine) -> None:
        """Hand out what is finished under weights that were changed in place once they are proved."""
        try:
            await self._stage_work.run(lambda: self._transaction.audit(engine))
        except PacelineError:
            self._live.staged = self._transaction.serving  # the version before; the engine is not asked any more
            self._known.difference_update(lost.request_id for lost in self._outbox.forget_withheld())
            raise
        self._outbox.hand_out()

    async def discard_staged(self, version: int) -> None:
        """Forget a staged version."""
        self._transaction.discard(version)

    async def report(self) -> ReplicaReport:
        """State, confirmed version and its digest."""
        return self._transaction.report()

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Serve this version to pinned requests until `unpin`; False when it is not the one served now.

        Raises:
            LateCommand: it is past the deadline; nobody would unpin it.
        """
        if version in self._pinned:
            return True
        engine = self._idle_engines.pop() if self._idle_engines else await self._stage_work.run(self._make_engine)
        if deadline_wall is not None and self._clock.wall() > deadline_wall:
            self._idle_engines.append(engine)
            raise LateCommand(f"{self._replica_id}: a pin of {Version.unpack(version)} came after its deadline")
        return await self._between_steps(lambda: self._pin_now(version, engine))

    async def unpin(self, version: int) -> None:
        """End a pinned session; harmless when there is none. What it still held is given back as aborted."""
        await self._between_steps(lambda: self._unpin_now(version))

    async def pause(self) -> None:
        """After this no decode step runs until `resume`; pausing twice is harmless."""
        self._paused = True
        await self._between_steps(lambda: None)

    async def resume(self) -> None:
        """Go on; resuming twice is harmless."""
        self._paused = False
        self._wake.set()

    def _swap_now(self, command: SwapCommand, swap: StepSwap) -> tuple[SwapReport, asyncio.Future[None]]:
        session = self._live
        if not swap.is_made:
            pause_began = self._last_step_ended if session.has_work else self._clock.now()
            if not self._partial_rollout and session.has_work:
                self._live = Session(engine=self._spare_engine(), staged=None, pinned=False)
            swap.make(pause_began)
        try:
            previous = swap.previous()
        except PacelineError:
            self._live = session
            raise
        self._live.staged = self._transaction.serving
        is_proved = self._transaction.report().state != "updating"
        if not is_proved:
            self._outbox.withhold()
        if session is not self._live:
            session.drain_until = self._clock.now() + self._drain_seconds
            self._draining.append(session)
        digest = self._transaction.report().digest
        report = SwapReport(self._replica_id, command.version, digest, swap.pause_seconds)
        return report, asyncio.ensure_future(self._finish_swap(previous, is_proved))

    def _end_overdue_drains(self) -> None:
        """Give back what has not ended under its old version in time, so that the version's memory comes free."""
        for session in [s for s in self._draining if self._clock.now() > s.drain_until]:
            aborted = session.engine.abort(sorted(session.requests))
            self._events.emit(
                ResponsesAborted(
                    replica=self._replica_id,
                    requests=[completion.request_id for completion in aborted],
                    reason=f"not ended {self._drain_seconds:g} s after the swap",
                )
            )
            self._outbox.put(aborted)
            self._draining.remove(session)
            self._retire(session)

    def _pin_now(self, version: int, engine: InferenceEngine) -> bool:
        staged = self._live.staged
        if staged is None or staged.manifest.version != version:
            self._idle_engines.append(engine)
            return False
        engine.bind(staged.tensors, version)
        self._pinned[version] = Session(engine=engine, staged=staged, pinned=True)
        return True

    def _unpin_now(self, version: int) -> None:
        session = self._pinned.pop(version, None)
        if session is not None:
            self._retire(session)

    def _spare_engine(self) -> InferenceEngine:
        return self._idle_engines.pop() if self._idle_engines else self._make_engine()

    def _retire(self, session: Session) -> None:
        session.requests.clear()
        session.engine.unbind()  # a bound tensor would keep the lease of its arena
        self._idle_engines.append(session.engine)
        if session.staged is not None and self._is_unused(session.staged):
            session.staged.release()

    def _is_unused(self, staged: StagedWeights) -> bool:
        return all(session.staged is not staged for session in self._sessions())

    # -- between two steps ---------------------------------------------------------------------------------------------

    async def _between_steps(self, action: Callable[[], T]) -> T:
        result: T = await self._ask(action).done
        return result

    def _ask(self, action: Callable[[], Any], swap: StepSwap | None = None) -> Request:
        self._refuse_when_closing()
        request = self._between.add(action, swap)
        self._wake.set()
        return request

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise WorkerDied(f"{self._replica_id} is closing", self._replica_id)

    def _fail_commands(self) -> None:
        self._between.fail(WorkerDied(f"{self._replica_id} is closing", self._replica_id))
        self._transaction.close()
