"""ServedStreams: the requests of a replica on their way through its server, one stream each.

consumes: requests, the server's token batches; produces: completions; waits for: the server; unblocked by: tokens,
`close`, `take_out`.

Law: a token carries the version that made it (V4): what the server tells of a stream (`spans`) when it ends. Where it
tells nothing, a stream was opened and has ended under one version, since it is closed before every pause: its tokens
count once the server has said, after its end, that it still serves that version. Tokens of weights that were not
confirmed here are never handed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.checkpoint_ports import TokenJournal
from paceline.core.errors import ConfigError, PacelineError, SyncError, WorkerDied
from paceline.core.sample import Completion, GenerationRequest, StepTokens
from paceline.core.server_ports import InferenceServer, TokenBatch
from paceline.core.version import Version


class LabelReader(Protocol):
    """What a server's label says: the version (packed), or None for weights that are none of ours."""

    def __call__(self, label: str) -> int | None: ...


@dataclass(slots=True)
class _Stream:
    request: GenerationRequest  # its lists grow with what is made
    base: int  # tokens that it carried when the stream was opened
    task: asyncio.Task[None] | None = None

    @property
    def has_tokens(self) -> bool:
        return len(self.request.response_ids) > self.base


class ServedStreams:
    """All streams of one server. `on_lost` is told once what cannot be got over here."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        replica_id: str,
        journal: TokenJournal,
        read_label: LabelReader,
        on_done: Callable[[Sequence[Completion]], None],
        on_tokens: Callable[[int, bool], None],
        on_lost: Callable[[PacelineError], None],
    ) -> None:
        self._server = server
        self._replica_id = replica_id
        self._journal = journal
        self._read_label = read_label
        self._on_done = on_done
        self._on_tokens = on_tokens
        self._on_lost = on_lost
        self._streams: dict[str, _Stream] = {}
        self._version: int | None = None
        self._holding = True
        self._changed = asyncio.Event()
        self._unproved: dict[str, str] = {}  # request -> how it ended
        self._proving = asyncio.Lock()

    @property
    def version(self) -> int | None:
        """The version (packed) that tokens are made by now."""
        return self._version

    @property
    def running(self) -> int:
        """Requests that the server has."""
        return sum(stream.task is not None for stream in self._streams.values())

    @property
    def waiting(self) -> int:
        """Requests that it has not been given yet."""
        return len(self._streams) - self.running

    def send(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests; while held they wait here."""
        for request in requests:
            if _is_complete(request):
                self._on_done([_completion(request, "length")])
                continue
            stream = _Stream(request, len(request.response_ids))
            self._streams[request.request_id] = stream
            if not self._holding:
                self._open(stream)

    def hold(self) -> None:
        """No new stream is opened until `go_on`."""
        self._holding = True

    def go_on(self, version: int) -> None:
        """Tokens are of this version from now on; everything that waits is opened."""
        self._version = version
        self._holding = False
        for stream in self._streams.values():
            if stream.task is None:
                self._open(stream)

    async def close(self) -> None:
        """End all streams and ask the server what it serves; their requests wait here with the tokens that they have.

        Raises:
            WorkerDied: it serves something else; nothing of these streams counts.
        """
        open_streams = [stream for stream in self._streams.values() if stream.task is not None]
        await self._end(open_streams)
        if open_streams or self._unproved:
            await self._prove()
        for stream in open_streams:
            self._keep(stream)

    async def close_unbegun(self) -> None:
        """End the streams that have no token yet; their requests wait here."""
        await self._end([s for s in self._streams.values() if s.task is not None and not s.has_tokens])

    async def all_ended(self) -> None:
        """Return once the server has none of our requests."""
        while self.running:
            self._changed.clear()
            await self._changed.wait()

    async def take_out(self, request_ids: Collection[str]) -> list[Completion]:
        """End these requests and return what they have, as aborted; unknown ids are ignored."""
        chosen = [self._streams[request_id] for request_id in request_ids if request_id in self._streams]
        await self._end(chosen)
        out = [stream for stream in chosen if self._streams.pop(stream.request.request_id, None) is stream]
        for stream in out:
            self._unproved.pop(stream.request.request_id, None)
        return [_completion(stream.request, "abort") for stream in out]

    def ids(self) -> list[str]:
        """All requests that are here."""
        return list(self._streams)

    def open_ids(self) -> list[str]:
        """Those that the server has."""
        return [request_id for request_id, stream in self._streams.items() if stream.task is not None]

    def pinned_ids(self, version: int) -> list[str]:
        """Those of a pinned version (packed)."""
        return [name for name, stream in self._streams.items() if stream.request.pinned_version == version]

    # -- one stream ----------------------------------------------------------------------------------------------------

    def _open(self, stream: _Stream) -> None:
        stream.base = len(stream.request.response_ids)
        stream.task = asyncio.ensure_future(self._read(stream))

    async def _end(self, streams: Sequence[_Stream]) -> None:
        tasks = [stream.task for stream in streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            stream.task = None
        self._changed.set()

    async def _read(self, stream: _Stream) -> None:
        """Until its last batch, or an error; ended from outside by cancellation."""
        request, this = stream.request, asyncio.current_task()
        reading = self._server.generate(request)
        try:
            async for batch in reading:
                self._append(stream, batch)
                if batch.finish_reason is not None:
                    self._finish(stream, batch)
                    break
            async with self._proving:  # whoever is first asks for all that have ended by then
                if request.request_id in self._unproved:
                    await self._prove()
        except ConfigError as error:  # this request cannot run; the others can
            self._fail(stream, error.message)
        except PacelineError as error:
            self._on_lost(error)
        finally:
            await reading.aclose()  # type: ignore[attr-defined] # an async generator wherever tokens come from
            if stream.task is this:  # else it was opened again, or is being ended
                stream.task = None
            self._changed.set()

    def _append(self, stream: _Stream, batch: TokenBatch) -> None:
        if self._version is None:
            raise SyncError(f"{self._replica_id}: tokens came before the first confirmed version")
        count = len(batch.token_ids)
        request = stream.request
        request.response_ids.extend(batch.token_ids)
        request.logprobs.extend(batch.logprobs)
        request.versions.extend([request.pinned_version or self._version] * count)
        self._on_tokens(count, request.pinned_version is not None)

    def _finish(self, stream: _Stream, batch: TokenBatch) -> None:
        if batch.finish_reason == "abort":  # by somebody else: our own end with their stream
            self._stamp(stream, batch)
            self._keep(stream)
            self._open(stream)
            return
        if batch.finish_reason == "error":
            self._fail(stream, batch.error or "the server failed it")
            return
        if batch.spans is None and self._server.streams == "closed":
            self._unproved[stream.request.request_id] = batch.finish_reason or "stop"
            return
        self._stamp(stream, batch)
        self._hand_on(stream, batch.finish_reason or "stop")

    def _hand_on(self, stream: _Stream, reason: str) -> None:
        self._keep(stream)
        del self._streams[stream.request.request_id]
        self._on_done([_completion(stream.request, reason)])

    async def _prove(self) -> None:
        """What has ended by now was made by the version that is served, if that is still served."""
        ended = dict(self._unproved)
        served = await self._server.weight_version()
        if served != self._version:
            raise self._foreign("weights of its own" if served is None else f"version {Version.unpack(served)}")
        for request_id, reason in ended.items():
            if self._unproved.pop(request_id, None) is not None and request_id in self._streams:
                self._hand_on(self._streams[request_id], reason)

    def _foreign(self, what: str) -> WorkerDied:
        known = "none" if self._version is None else str(Version.unpack(self._version))
        line = f"{self._replica_id}: the server serves {what}, confirmed is {known}"
        return WorkerDied(f"{line}; it was started again or somebody else loads weights", self._replica_id)

    def _stamp(self, stream: _Stream, batch: TokenBatch) -> None:
        """Correct the versions of a stream by what the server says.

        Raises:
            SyncError: it says nothing. WorkerDied: it says that weights made them that are none of ours.
        """
        versions = stream.request.versions
        if batch.spans is None and len(versions) > stream.base:
            _cut(stream.request, stream.base)
            raise SyncError(
                f"{self._replica_id}: the server does not tell which weights made a token; vLLM >= 0.30 does"
            )
        for span in batch.spans or ():
            version = self._read_label(span.label)
            if version is None or (self._version is not None and version > self._version):
                _cut(stream.request, stream.base)
                raise self._foreign(f"weights {span.label!r}")
            for place in range(stream.base + span.start, min(stream.base + span.end, len(versions))):
                versions[place] = version

    def _keep(self, stream: _Stream) -> None:
        """Write what this stream has made to the journal, now that its versions are right."""
        request = stream.request
        if request.pinned_version is not None:
            return
        for place in range(stream.base, len(request.response_ids)):
            self._journal.append(
                StepTokens(
                    [request.request_id],
                    [request.response_ids[place]],
                    [request.logprobs[place]],
                    request.versions[place],
                )
            )
        stream.base = len(request.response_ids)

    def _fail(self, stream: _Stream, reason: str) -> None:
        if self._streams.pop(stream.request.request_id, None) is stream:
            self._on_done([Completion(stream.request.request_id, [], [], [], "error", reason)])


def _is_complete(request: GenerationRequest) -> bool:
    ids, params = request.response_ids, request.params
    return len(ids) >= params.max_tokens or bool(ids and ids[-1] in params.stop_token_ids)


def _completion(request: GenerationRequest, reason: str) -> Completion:
    ended = bool(request.response_ids) and request.response_ids[-1] in request.params.stop_token_ids
    return Completion(
        request.request_id,
        list(request.response_ids),
        list(request.logprobs),
        list(request.versions),
        "abort" if reason == "abort" else "stop" if ended else "length" if reason == "length" else "stop",
    )


def _cut(request: GenerationRequest, length: int) -> None:
    del request.response_ids[length:]
    del request.logprobs[length:]
    del request.versions[length:]
