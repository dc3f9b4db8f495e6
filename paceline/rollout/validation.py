"""Validator: what one published version is worth, measured beside training.

A validation pins the version on the replicas before the next sync can begin, so its result belongs to that version
whatever is published meanwhile. One record per requested version: finished, or skipped with the reason. At most
`max_pinned` validations run at once; nobody waits for one but `wait`. The trainer's side may have a share of the
prompts; what it does not do in time the replicas do.

consumes: completions of pinned requests; produces: `validation.*` events; waits for: replicas, the trainer's side;
unblocked by: completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from paceline.core.commands import ValidationResult
from paceline.core.config import Config
from paceline.core.errors import PacelineError, WorkerDied
from paceline.core.events import EventSink, ValidationFinished, ValidationSkipped, ValidationStarted
from paceline.core.ports import VALIDATOR, Clock, TextDecoder, TrainerSide
from paceline.core.sample import Completion, GenerationRequest, Prompt
from paceline.core.waits import Waits
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.fleet import Fleet
from paceline.rollout.replica_feed import ReplicaFeed
from paceline.rollout.sampling_params import validation_params
from paceline.rollout.validation_results import fold, score_all

T = TypeVar("T")

PREFIX = "validation:"
PATIENCE_SECONDS = 2.0  # beyond the deadline, which whoever is slow but alive keeps by itself


class _Generated(NamedTuple):
    """One completion per prompt; so many by the trainer's side, or why it made none."""

    completions: list[Completion]
    by_trainer: int
    trainer_error: str


class Validator:
    """Runs validations over the replicas' pinned sessions."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        fleet: Fleet,
        reward: BoundedReward,
        decoder: TextDecoder,
        clock: Clock,
        events: EventSink,
        leave_result: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._leave_result = leave_result
        self._prompts = prompts
        self._params = validation_params(config, stop_token_ids)
        self._n = config.rollout.val_kwargs.n
        # Half of the places at most: samples are not to wait for a whole validation to be scored.
        self._scores_at_once = max(1, config.reward.num_workers // 2)
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

    async def start(self, version: int, step: int, trainer_side: TrainerSide | None = None) -> None:
        """Pin the version on all replicas that serve it and begin; returns once it is pinned. `trainer_side` takes its
        share, as one worker among the replicas.
        """
        if not self._prompts:
            self._events.emit(ValidationSkipped(version=version, reason="there are no validation prompts"))
            return
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
        task = asyncio.ensure_future(self._validate(version, step, pinned, trainer_side))
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

    async def _validate(
        self, version: int, step: int, feeds: Sequence[ReplicaFeed], trainer_side: TrainerSide | None
    ) -> None:
        began = self._clock.now()
        try:
            generated = await self._waits.bounded(
                self._generate(version, feeds, trainer_side),
                seconds=self._deadline_seconds,
                what=f"{len(self._prompts)} validation responses",
                culprit="replicas",
            )
            completions = generated.completions
            asked = [prompt for prompt in self._prompts for _ in range(self._n)]
            scores = await score_all(
                asked, completions, reward=self._reward, decoder=self._decoder, at_once=self._scores_at_once
            )
        except PacelineError as error:  # a failed validation is a record; training goes on
            self._events.emit(ValidationSkipped(version=version, reason=f"failed: {error.message}"))
            return
        finally:
            del self._pinned[version]
            await self._unpin(version, feeds)
        results = fold(self._prompts, scores, self._n)
        count = len(completions)
        self._events.emit(
            ValidationFinished(
                version=version,
                step=step,
                accuracy=results.accuracy,
                metrics=results.metrics,
                problems=len(self._prompts),
                seconds=self._clock.now() - began,
                response_length_mean=sum(len(c.token_ids) for c in completions) / count,
                by_trainer=generated.by_trainer,
                trainer_error=generated.trainer_error,
            )
        )
        await self._leave(ValidationResult(version, step, results.accuracy, len(self._prompts)))

    async def _leave(self, result: ValidationResult) -> None:
        """For the trainer, beside the samples."""
        leaving = self._leave_result(msgspec.msgpack.encode(result))
        try:
            await self._waits.bounded(
                leaving, seconds=self._reply_seconds, what="the queue to take a result", culprit="message queue"
            )
        except PacelineError:
            return  # it is in the event log; a queue that is gone ends the run where samples go in and out

    async def _generate(
        self, version: int, feeds: Sequence[ReplicaFeed], trainer_side: TrainerSide | None
    ) -> _Generated:
        requests = [
            GenerationRequest(
                request_id=f"{PREFIX}{version}:{index}",
                prompt_ids=list(prompt.token_ids),
                params=self._params,
                pinned_version=version,
            )
            for index, prompt in enumerate(prompt for prompt in self._prompts for _ in range(self._n))
        ]
        if trainer_side is None:
            return _Generated(await self._on_replicas(requests, feeds), 0, "")
        share = requests[len(feeds) :: len(feeds) + 1]
        theirs = {request.request_id for request in share}
        on_trainer = asyncio.ensure_future(self._on_trainer(trainer_side, version, share))
        try:
            made = await self._on_replicas([one for one in requests if one.request_id not in theirs], feeds)
            also_made, error = await on_trainer
        finally:
            on_trainer.cancel()
        by_id = {completion.request_id: completion for completion in [*made, *also_made]}
        return _Generated([by_id[one.request_id] for one in requests], 0 if error else len(share), error)

    async def _on_replicas(
        self, requests: Sequence[GenerationRequest], feeds: Sequence[ReplicaFeed]
    ) -> list[Completion]:
        """One completion per request, in order."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = []
        batches: list[list[GenerationRequest]] = [[] for _ in feeds]
        for index, request in enumerate(requests):
            future: asyncio.Future[Completion] = loop.create_future()
            self._expected[request.request_id] = future
            futures.append(future)
            batches[index % len(feeds)].append(request)
        for feed, batch in zip(feeds, batches, strict=True):
            if batch:
                feed.send(batch)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for request in requests:
                self._expected.pop(request.request_id, None)

    async def _on_trainer(
        self, trainer_side: TrainerSide, version: int, share: Sequence[GenerationRequest]
    ) -> tuple[list[Completion], str]:
        """The share's completions, and why the replicas made them where the trainer's side did not."""
        if not share:
            return [], ""
        seconds = self._deadline_seconds / 2  # so that the replicas have time to do it after all
        call = asyncio.ensure_future(trainer_side.generate(version, share, self._clock.wall() + seconds))
        try:
            await asyncio.wait({call}, timeout=seconds + PATIENCE_SECONDS)
            if call.done():
                error = _what_is_wrong(call, version, share)
            else:
                error = f"{VALIDATOR} did not answer within {seconds + PATIENCE_SECONDS:g} s"
                self._fleet.report_loss(VALIDATOR, error)  # it may hold the version: its process has to end
        finally:
            call.cancel()
        if not error:
            return call.result(), ""
        ready = self._fleet.feeds()
        left = [feed for feed in self._pinned.get(version, []) if feed in ready]
        if not left:
            raise WorkerDied(f"every replica that served the version is lost, and {error}", "replicas")
        return await self._on_replicas(share, left), error


def _what_is_wrong(call: asyncio.Future[list[Completion]], version: int, share: Sequence[GenerationRequest]) -> str:
    """Why this answer cannot be taken: a failure, or responses that are not one per request and of the version."""
    if call.cancelled():
        return f"the call to {VALIDATOR} was cancelled"
    error = call.exception()
    if isinstance(error, PacelineError):
        return error.message
    if error is not None:
        raise error
    made = call.result()
    if sorted(one.request_id for one in made) != sorted(request.request_id for request in share):
        return f"{VALIDATOR} made {len(made)} responses to {len(share)} requests"
    strange = [one for one in made if one.finish_reason in ("abort", "error") or set(one.versions) - {version}]
    return f"{VALIDATOR} made {len(strange)} responses that are not of the version" if strange else ""
