"""Validator: greedy accuracy of one published version, measured beside training.

A validation pins the version on the replicas before the next sync can begin, so its result belongs to that version
whatever is published meanwhile. One record per requested version: finished, or skipped with the reason. At most
`max_pinned` validations run at once; nobody waits for one but `wait`.

consumes: completions of pinned requests; produces: `validation.*` events; waits for: replicas; unblocked by:
completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from paceline.core.config import Config
from paceline.core.errors import PacelineError, WorkerDied
from paceline.core.events import EventSink, ValidationFinished, ValidationSkipped, ValidationStarted
from paceline.core.ports import Clock, RewardFn, TextDecoder
from paceline.core.sample import Completion, GenerationRequest, Prompt, SamplingParams
from paceline.core.waits import Waits
from paceline.rollout.fleet import Fleet
from paceline.rollout.replica_feed import ReplicaFeed

T = TypeVar("T")

PREFIX = "validation:"


class Validator:
    """Runs validations over the replicas' pinned sessions."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        fleet: Fleet,
        reward: RewardFn,
        decoder: TextDecoder,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._prompts = prompts
        self._params = SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            max_tokens=config.data.max_response_length,
            stop_token_ids=stop_token_ids,
        )
        self._fleet = fleet
        self._reward = reward
        self._decoder = decoder
        self._max_pinned = config.rollout.max_pinned_versions
        self._deadline_seconds = config.trainer.stall_timeout_seconds
        self._reply_seconds = config.checkpoint_engine.sync_timeout_seconds / 2  # within the wait of who asked
        self._clock = clock
        self._events = events
        self._waits = Waits(who="validation", clock=clock, events=events)
        self._expected: dict[str, asyncio.Future[Completion]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._unpinning: set[asyncio.Task[None]] = set()
        self._pinned: dict[int, list[ReplicaFeed]] = {}

    async def start(self, version: int, step: int) -> None:
        """Pin the version on all replicas that serve it and begin; returns once it is pinned."""
        if len(self._running) + self._starting >= self._max_pinned:
            self._events.emit(ValidationSkipped(version=version, reason="pin limit"))
            return
        self._starting += 1
        try:
            pinned = await self._pin_all(version)
        except asyncio.CancelledError:
            self._events.emit(ValidationSkipped(version=version, reason="cancelled"))
            raise
        finally:
            self._starting -= 1
        if not pinned:
            self._events.emit(ValidationSkipped(version=version, reason="no replica serves this version"))
            return
        self._events.emit(ValidationStarted(version=version, problems=len(self._prompts)))
        self._pinned[version] = pinned
        task = asyncio.ensure_future(self._validate(version, step, pinned))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _pin_all(self, version: int) -> list[ReplicaFeed]:
        feeds = self._fleet.feeds()
        deadline = self._clock.wall() + self._reply_seconds
        calls = (self._bounded(feed, feed.replica.pin(version, deadline), "a pin") for feed in feeds)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PacelineError | asyncio.CancelledError):
                raise answer
        unsure = [feed for feed, answer in zip(feeds, answers, strict=True) if isinstance(answer, BaseException)]
        self._in_background(self._unpin(version, unsure))  # pinned or not: a pin that nobody knows would last for ever
        ready = self._fleet.feeds()  # one that was lost meanwhile has taken its pin with it
        return [feed for feed, answer in zip(feeds, answers, strict=True) if answer is True and feed in ready]

    async def _unpin(self, version: int, feeds: Sequence[ReplicaFeed]) -> None:
        await asyncio.gather(*(self._unpin_one(version, feed) for feed in feeds), return_exceptions=True)

    async def _unpin_one(self, version: int, feed: ReplicaFeed) -> None:
        for last in (False, True):
            try:
                await self._bounded(feed, feed.replica.unpin(version), "the end of a pin")
            except PacelineError as error:
                if last:
                    self._fleet.lose(feed.replica.replica_id, f"does not end a pin: {error.message}")
            else:
                return

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._unpinning.add(task)
        task.add_done_callback(self._unpinning.discard)

    async def _bounded(self, feed: ReplicaFeed, call: Awaitable[T], what: str) -> T:
        culprit = feed.replica.replica_id
        return await self._waits.bounded(call, seconds=self._reply_seconds, what=what, culprit=culprit)

    async def wait(self) -> None:
        """Return once no validation runs."""
        while self._running:
            await asyncio.wait(list(self._running))

    def reassign(self, orphans: Sequence[GenerationRequest]) -> None:
        """Give a lost replica's requests to another one that pinned the same version; with none left, the validation
        fails and says so.
        """
        for request in orphans:
            waiting = self._expected.get(request.request_id)
            version = request.pinned_version
            if waiting is None or waiting.done() or version is None:
                continue
            ready = self._fleet.feeds()
            others = [feed for feed in self._pinned.get(version, []) if feed in ready]
            if others:
                others[0].send([request])
            else:
                waiting.set_exception(WorkerDied("every replica that served the version is lost", "replicas"))

    def accept(self, completion: Completion) -> None:
        """A completion of a pinned request."""
        waiting = self._expected.pop(completion.request_id, None)
        if waiting is None or waiting.done():
            return
        if completion.finish_reason in ("abort", "error"):
            waiting.set_exception(WorkerDied(f"a response was not made: {completion.error or 'aborted'}", "replicas"))
        else:
            waiting.set_result(completion)

    async def _validate(self, version: int, step: int, feeds: Sequence[ReplicaFeed]) -> None:
        began = self._clock.now()
        try:
            completions = await self._waits.bounded(
                self._generate(version, feeds),
                seconds=self._deadline_seconds,
                what=f"{len(self._prompts)} validation responses",
                culprit="replicas",
            )
            rewards = [
                await self._reward.score(prompt, self._decoder.decode(completion.token_ids))
                for prompt, completion in zip(self._prompts, completions, strict=True)
            ]
        except PacelineError as error:  # a failed validation is a record; training goes on
            self._events.emit(ValidationSkipped(version=version, reason=f"failed: {error.message}"))
            return
        finally:
            del self._pinned[version]
            await self._unpin(version, feeds)
        count = len(completions)
        self._events.emit(
            ValidationFinished(
                version=version,
                step=step,
                accuracy=sum(rewards) / count,
                problems=count,
                seconds=self._clock.now() - began,
                response_length_mean=sum(len(c.token_ids) for c in completions) / count,
            )
        )

    async def _generate(self, version: int, feeds: Sequence[ReplicaFeed]) -> list[Completion]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = []
        batches: list[list[GenerationRequest]] = [[] for _ in feeds]
        for index, prompt in enumerate(self._prompts):
            request = GenerationRequest(
                request_id=f"{PREFIX}{version}:{index}",
                prompt_ids=list(prompt.token_ids),
                params=self._params,
                pinned_version=version,
            )
            future: asyncio.Future[Completion] = loop.create_future()
            self._expected[request.request_id] = future
            futures.append(future)
            batches[index % len(feeds)].append(request)
        for feed, batch in zip(feeds, batches, strict=True):
            if batch:
                feed.send(batch)
        return list(await asyncio.gather(*futures))
