"""A replica whose every token is made by hand: it decodes, finishes and refuses exactly what a test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from paceline.core.checkpoint import JournalledSequence, Partial, prompt_checksum
from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.errors import WorkerDied
from paceline.core.sample import Completion, FinishReason, GenerationRequest
from paceline.testing.recording import CallLog, RecordingReplica


class HandReplica(RecordingReplica):
    """Holds requests until it is told what to make of them. `version` (packed) makes its tokens."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(CallLog(), replica_id)
        self.version = -1
        self.is_dead = False
        self.held: dict[str, GenerationRequest] = {}
        self.aborted: list[str] = []
        self._done: deque[tuple[int, Completion]] = deque()
        self._batch = 0
        self._known: set[str] = set()

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Requests in, what is finished out; what is aborted is forgotten."""
        if self.is_dead:
            raise WorkerDied(f"{self.replica_id} died", self.replica_id)
        while self._done and self._done[0][0] <= request.acknowledged:
            self._done.popleft()
        for one in request.requests:
            assert one.request_id not in self._known, f"{one.request_id} came twice"
            self._known.add(one.request_id)
            self.held[one.request_id] = one
        for request_id in request.aborted:
            if self.held.pop(request_id, None) is not None:
                self.aborted.append(request_id)
        await asyncio.sleep(request.wait_seconds)
        if self.is_dead:
            raise WorkerDied(f"{self.replica_id} died", self.replica_id)
        return ExchangeReply(
            batch=self._batch,
            completions=[completion for _, completion in self._done],
            running=len(self.held),
            waiting=0,
        )

    def decode(self, request_ids: Sequence[str]) -> None:
        """One more token for each, unless it has all that it may have."""
        for request_id in request_ids:
            one = self.held[request_id]
            if len(one.response_ids) < one.params.max_tokens:
                one.response_ids.append(len(one.response_ids))
                one.logprobs.append(-1.0)
                one.versions.append(self.version)

    def finish(self, request_id: str, reason: FinishReason = "stop") -> None:
        """This one is over, for this reason; a response that is finished has a token at least."""
        one = self.held[request_id]
        if reason in ("stop", "length") and not one.response_ids:
            self.decode([request_id])
        del self.held[request_id]
        self._batch += 1
        made = Completion(request_id, one.response_ids, one.logprobs, one.versions, reason)
        if reason == "error":
            made = Completion(request_id, [], [], [], reason, "the engine cannot run it")
        self._done.append((self._batch, made))

    def journal(self, life: int) -> list[JournalledSequence]:
        """What a token journal of this replica would have."""
        return [
            JournalledSequence(
                life,
                one.request_id,
                prompt_checksum(one.prompt_ids),
                Partial(list(one.response_ids), list(one.logprobs), list(one.versions)),
            )
            for one in self.held.values()
            if one.response_ids
        ]
