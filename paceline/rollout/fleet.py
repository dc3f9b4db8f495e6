"""Fleet: the replicas of a run as the rollouter sees them.

    JOINING -> READY(v) -> FENCED -> READY(w)         LOST from any of them, when the replica is gone

Law: traffic goes to READY members only (V5). What a fenced or lost member still owed is handed over, once per loss,
and what it may yet deliver is not read. Members come and go while others work; none waits for another. With nobody
left for `return_seconds` the fleet fails with the names of those it lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import DeadlineExceeded, PacelineError, WorkerDied
from paceline.core.events import EventSink, ReplicaChanged, ZombiesRefused
from paceline.core.ports import ReplicaControl
from paceline.core.sample import Completion, GenerationRequest
from paceline.core.waits import Waits
from paceline.rollout.load_balancer import LoadBalancer
from paceline.rollout.replica_feed import ReplicaFeed

MemberState = Literal["joining", "ready", "fenced"]


@dataclass(slots=True)
class _Member:
    feed: ReplicaFeed
    state: MemberState
    version: int | None = None
    exchanging: asyncio.Task[None] | None = None
    left: bool = False


class Fleet:
    """Members by name, at first `replicas`. `on_completions` gets what comes back, `on_orphans` what has to be done by
    somebody else.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaControl] = (),
        *,
        on_completions: Callable[[str, Sequence[Completion]], None],
        on_orphans: Callable[[Sequence[GenerationRequest]], None],
        waits: Waits,
        events: EventSink,
        reply_seconds: float,
        return_seconds: float,
    ) -> None:
        self._on_completions = on_completions
        self._on_orphans = on_orphans
        self._waits = waits
        self._events = events
        self._reply_seconds = reply_seconds
        self._return_seconds = return_seconds
        self._members: dict[str, _Member] = {}
        self._lost: dict[str, str] = {}
        self._balancer = LoadBalancer()
        self._changed = asyncio.Event()
        self._losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        for replica in replicas:
            self.add(replica)

    # -- membership ----------------------------------------------------------------------------------------------------

    def add(self, replica: ReplicaControl) -> None:
        """A replica joins, or comes back as a new process under its old name; no traffic before `confirm`."""
        replica_id = replica.replica_id
        if replica_id in self._members:
            self._leave(replica_id, "replaced")
        self._lost.pop(replica_id, None)
        self._members[replica_id] = _Member(feed=self._new_feed(replica), state="joining")
        self._record(replica_id, "joining", "")
        self._changed.set()

    def confirm(self, versions: Mapping[str, int]) -> None:
        """These members have confirmed these versions (packed) and get traffic."""
        for replica_id, version in versions.items():
            member = self._members.get(replica_id)
            if member is None:
                continue
            member.version = version if member.version is None else max(version, member.version)
            self._balancer.open(replica_id, member.version)
            if member.state != "ready":
                member.state = "ready"
                member.exchanging = asyncio.ensure_future(self._exchange(replica_id, member))
                self._record(replica_id, "ready", "")
        self._changed.set()

    def fence(self, reasons: Mapping[str, str]) -> None:
        """These members cannot be trusted until they confirm a version again; what they owed is handed over."""
        for replica_id, reason in reasons.items():
            member = self._members.get(replica_id)
            if member is None or member.state == "fenced":
                continue
            owed = self._stop(replica_id, member)
            self._members[replica_id] = _Member(feed=self._new_feed(member.feed.replica), state="fenced")
            self._record(replica_id, "fenced", reason)
            self._on_orphans(owed)
        self._changed.set()

    def lose(self, replica_id: str, reason: str) -> None:
        """This member is gone. Twice is harmless."""
        if replica_id in self._members:
            self._lost[replica_id] = reason
            self.report_loss(replica_id, reason)
            self._leave(replica_id, reason)
            self._changed.set()

    def remove(self, replica_id: str) -> None:
        """Take a member out on purpose; what it owed is handed over."""
        if replica_id in self._members:
            self._leave(replica_id, "removed")
            self._changed.set()

    def report_loss(self, name: str, reason: str) -> None:
        """A process has to be ended, a member's or another's: for whoever asks for the next loss."""
        self._losses.put_nowait((name, reason))

    async def next_loss(self, wait_seconds: float) -> tuple[str, str] | None:
        """The next member that was lost and why, or None when none was in this time."""
        try:
            async with asyncio.timeout(wait_seconds):
                return await self._losses.get()
        except TimeoutError:
            return None

    # -- traffic -------------------------------------------------------------------------------------------------------

    def send(self, requests: Sequence[GenerationRequest]) -> str | None:
        """Give these requests to the least loaded READY member; its name, or None when there is none."""
        replica_id = self._balancer.choose(len(requests))
        if replica_id is not None:
            self._members[replica_id].feed.send(requests)
        return replica_id

    def abort(self, request_ids: Collection[str]) -> None:
        """Nobody waits for these requests any more; who has them forgets them."""
        for replica_id, member in self._members.items():
            self._balancer.done(replica_id, member.feed.abort(request_ids))

    def feeds(self) -> list[ReplicaFeed]:
        """Lines to the READY members."""
        return [member.feed for member in self._members.values() if member.state == "ready"]

    def replicas(self) -> list[ReplicaControl]:
        """All members, whatever their state."""
        return [member.feed.replica for member in self._members.values()]

    async def tell(self, what: str, call: Callable[[ReplicaControl], Awaitable[None]]) -> None:
        """Have all members do something, each within the time of a reply; one that does not is lost."""

        async def tell_one(replica_id: str, replica: ReplicaControl) -> None:
            try:
                await self._waits.bounded(call(replica), seconds=self._reply_seconds, what=what, culprit=replica_id)
            except PacelineError as error:
                member = self._members.get(replica_id)
                if member is not None and member.feed.replica is replica:
                    self.lose(replica_id, error.message)

        members = [(name, member.feed.replica) for name, member in self._members.items()]
        results = await asyncio.gather(*(tell_one(*member) for member in members), return_exceptions=True)
        for (replica_id, _), result in zip(members, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                self.lose(replica_id, f"{what} was cancelled")
            elif isinstance(result, BaseException):
                raise result

    def __len__(self) -> int:
        return len(self._members)

    async def run(self) -> None:
        """Watch over the members until cancelled.

        Raises:
            WorkerDied: nobody has been left for `return_seconds`; names who was lost.
        """
        try:
            while True:
                self._changed.clear()
                if not self._members and self._lost:
                    await self._until_somebody_returns()
                else:
                    await self._changed.wait()
        finally:
            for member in self._members.values():
                member.left = True
                if member.exchanging is not None:
                    member.exchanging.cancel()

    async def _until_somebody_returns(self) -> None:
        lost = "; ".join(f"{name}: {reason}" for name, reason in self._lost.items())
        try:
            await self._waits.bounded(
                self._changed.wait(), seconds=self._return_seconds, what="a replica", culprit=", ".join(self._lost)
            )
        except DeadlineExceeded as error:
            raise WorkerDied(f"no replica is left ({lost})", ", ".join(self._lost)) from error

    async def _exchange(self, replica_id: str, member: _Member) -> None:
        reason = ""
        try:
            await member.feed.run()
        except PacelineError as error:
            reason = error.message
        except asyncio.CancelledError:
            if member.left:
                raise
            reason = "its exchange was cancelled"  # by nobody here; unnoticed, it would owe its responses for ever
        if self._members.get(replica_id) is member:
            self.lose(replica_id, reason)

    def _leave(self, replica_id: str, reason: str) -> None:
        member = self._members.pop(replica_id)
        owed = self._stop(replica_id, member)
        self._record(replica_id, "lost", reason)
        self._on_orphans(owed)

    def _stop(self, replica_id: str, member: _Member) -> list[GenerationRequest]:
        self._balancer.close(replica_id)
        member.left = True
        if member.exchanging is not None:
            member.exchanging.cancel()
        return member.feed.take_owed()

    def _new_feed(self, replica: ReplicaControl) -> ReplicaFeed:
        return ReplicaFeed(
            replica=replica,
            on_completions=self._deliver,
            on_late=self._refuse_late,
            waits=self._waits,
            reply_seconds=self._reply_seconds,
        )

    def _refuse_late(self, replica_id: str, completions: int) -> None:
        """Others have been asked for these, or nobody wants them any more."""
        self._events.emit(ZombiesRefused(replica=replica_id, completions=completions))

    def _deliver(self, replica_id: str, completions: Sequence[Completion]) -> None:
        self._balancer.done(replica_id, len(completions))
        self._on_completions(replica_id, completions)

    def _record(self, replica_id: str, state: Literal["joining", "ready", "fenced", "lost"], reason: str) -> None:
        self._events.emit(ReplicaChanged(replica=replica_id, state=state, reason=reason))
