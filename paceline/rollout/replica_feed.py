"""ReplicaFeed: the rollouter's line to one replica: batches of requests out, batches of completions back.

consumes: requests given to `send`; produces: completions, handed to `on_completions`; waits for: requests, the
replica's reply; unblocked by: `send`, the replica, cancellation. Completions are acknowledged with the next call.
What was sent and has not come back is known, so that it can be handed over when the replica is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from paceline.core.commands import ExchangeRequest
from paceline.core.ports import ReplicaControl
from paceline.core.sample import Completion, GenerationRequest
from paceline.core.waits import Waits

POLL_SECONDS = 0.05


class ReplicaFeed:
    """One replica's outgoing requests and its exchange loop; `reply_seconds` bounds one exchange."""

    def __init__(
        self,
        *,
        replica: ReplicaControl,
        on_completions: Callable[[str, Sequence[Completion]], None],
        on_late: Callable[[str, int], None],
        waits: Waits,
        reply_seconds: float,
    ) -> None:
        self._replica = replica
        self._on_completions = on_completions
        self._on_late = on_late
        self._waits = waits
        self._reply_seconds = reply_seconds
        self._pending: list[GenerationRequest] = []
        self._owed: dict[str, GenerationRequest] = {}
        self._aborted: list[str] = []
        self._acknowledged = 0
        self._wake = asyncio.Event()

    @property
    def replica(self) -> ReplicaControl:
        """The replica at the other end."""
        return self._replica

    def send(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; they go out with the next exchange."""
        self._pending.extend(requests)
        self._owed.update((request.request_id, request) for request in requests)
        self._wake.set()

    def take_owed(self) -> list[GenerationRequest]:
        """Everything that has not come back, for somebody else to do; this feed forgets it."""
        owed = list(self._owed.values())
        self._owed.clear()
        self._pending.clear()
        return owed

    def abort(self, request_ids: Collection[str]) -> int:
        """These are not wanted any more; returns how many of them were owed. What may still come is not read."""
        mine = [request_id for request_id in request_ids if self._owed.pop(request_id, None) is not None]
        unsent = {request.request_id for request in self._pending}.intersection(mine)
        self._pending = [request for request in self._pending if request.request_id not in unsent]
        self._aborted.extend(request_id for request_id in mine if request_id not in unsent)
        self._wake.set()
        return len(mine)

    async def run(self) -> None:
        """Exchange for ever; ends by cancellation or by the replica's error."""
        while True:
            if not self._owed and not self._aborted:
                self._wake.clear()
                await self._wake.wait()
            batch, self._pending = self._pending, []
            aborted, self._aborted = self._aborted, []
            reply = await self._waits.bounded(
                self._replica.exchange(
                    ExchangeRequest(batch, self._acknowledged, wait_seconds=POLL_SECONDS, aborted=aborted)
                ),
                seconds=self._reply_seconds,
                what="an exchange",
                culprit=self._replica.replica_id,
            )
            self._acknowledged = reply.batch
            owed = [c for c in reply.completions if self._owed.pop(c.request_id, None) is not None]
            if owed:
                self._on_completions(self._replica.replica_id, owed)
            if len(owed) < len(reply.completions):
                self._on_late(self._replica.replica_id, len(reply.completions) - len(owed))
