"""A validation that the trainer's side has a share of: one record, every prompt once, whatever that side does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from paceline.core.commands import ExchangeReply, ExchangeRequest, ValidationResult
from paceline.core.config import build_config
from paceline.core.errors import SyncError
from paceline.core.events import ValidationFinished, ValidationSkipped
from paceline.core.ports import VALIDATOR
from paceline.core.sample import Completion, GenerationRequest, Prompt
from paceline.core.waits import Waits
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.fleet import Fleet
from paceline.rollout.validation import Validator
from paceline.testing.marker_task import NumberDecoder
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica
from paceline.testing.virtual_clock import VirtualClock, run_virtual

PROBLEMS = 8
VERSION = 7
STALL_SECONDS = 60.0


def answer(request: GenerationRequest, by: int) -> Completion:
    """The prompt's own number, and who made it."""
    return Completion(request.request_id, [request.prompt_ids[0], by], [-1.0, -1.0], [VERSION, VERSION], "stop")


class AnsweringReplica(RecordingReplica):
    """Answers at once."""

    def __init__(self, clock: VirtualClock, number: int) -> None:
        super().__init__(CallLog(), f"replica-{number}")
        self._clock = clock
        self._number = number
        self._batch = 0
        self.asked: list[str] = []

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await self._clock.sleep(0.01)
        self.asked.extend(one.request_id for one in request.requests)
        self._batch += len(request.requests)
        done = [answer(one, self._number) for one in request.requests]
        return ExchangeReply(batch=self._batch, completions=done, running=0, waiting=0)


Generate = Callable[[Sequence[GenerationRequest]], Awaitable[list[Completion]]]


class Side:
    """The trainer's side, as a test wants it."""

    def __init__(self, how: Generate) -> None:
        self._how = how
        self.asked: list[str] = []

    async def generate(
        self, version: int, requests: Sequence[GenerationRequest], deadline_wall: float
    ) -> list[Completion]:
        self.asked.extend(one.request_id for one in requests)
        return await self._how(requests)


async def works(requests: Sequence[GenerationRequest]) -> list[Completion]:
    await asyncio.sleep(1.0)
    return [answer(one, 9) for one in reversed(requests)]


async def refuses(requests: Sequence[GenerationRequest]) -> list[Completion]:
    raise SyncError("the snapshot is gone")


async def is_cancelled(requests: Sequence[GenerationRequest]) -> list[Completion]:
    raise asyncio.CancelledError


async def is_silent(requests: Sequence[GenerationRequest]) -> list[Completion]:
    await asyncio.Event().wait()
    raise AssertionError


async def forgets_one(requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [answer(one, 9) for one in requests[1:]]


async def answers_one_twice(requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [answer(one, 9) for one in [requests[0], *requests[:-1]]]


async def uses_another_version(requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [Completion(one.request_id, [1], [-1.0], [VERSION + 1], "stop") for one in requests]


class OrderedReward:
    """1 for the answer to this very prompt."""

    def __init__(self) -> None:
        self.scored: Counter[str] = Counter()

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self.scored[prompt.prompt_id] += 1
        return float(response_text.split(maxsplit=1)[0] == str(prompt.token_ids[0]))


class Scene:
    """Two replicas, a validator, what came of it."""

    def __init__(self, clock: VirtualClock, how: Generate | None) -> None:
        self.events = RecordingEvents()
        self.reward = OrderedReward()
        self.replicas = [AnsweringReplica(clock, 0), AnsweringReplica(clock, 1)]
        self.side = None if how is None else Side(how)
        self.fleet = Fleet(
            on_completions=self._deliver,
            on_orphans=lambda requests: None,
            waits=Waits(who="rollouter", clock=clock, events=self.events),
            events=self.events,
            reply_seconds=10.0,
            return_seconds=10.0,
        )
        config = build_config({"trainer": {"stall_timeout_seconds": STALL_SECONDS}})
        self.validator = Validator(
            config,
            prompts=[Prompt(f"v{i}", "?", (100 + i,), "", "t") for i in range(PROBLEMS)],
            stop_token_ids=(),
            fleet=self.fleet,
            reward=BoundedReward(config.reward, self.reward),
            decoder=NumberDecoder(),
            clock=clock,
            events=self.events,
            leave_result=self._keep,
        )
        self.results: list[ValidationResult] = []
        self.lost: tuple[str, str] | None = None

    async def _keep(self, encoded: bytes) -> None:
        self.results.append(msgspec.msgpack.decode(encoded, type=ValidationResult))

    def _deliver(self, replica: str, completions: Sequence[Completion]) -> None:
        for one in completions:
            self.validator.accept(one)

    async def run(self) -> None:
        for replica in self.replicas:
            self.fleet.add(replica)
        self.fleet.confirm({"replica-0": VERSION, "replica-1": VERSION})
        await self.validator.start(VERSION, 3, self.side)
        await self.validator.wait()
        self.lost = await self.fleet.next_loss(0.1)

    @property
    def record(self) -> ValidationFinished:
        """The one record."""
        assert not self.events.of(ValidationSkipped)
        (record,) = self.events.of(ValidationFinished)
        return record


def validate(how: Generate | None) -> Scene:
    async def main(clock: VirtualClock) -> Scene:
        scene = Scene(clock, how)
        await scene.run()
        return scene

    return run_virtual(main)


def test_replicas_and_the_trainers_side_share_evenly_and_each_prompt_is_scored_once() -> None:
    scene = validate(works)
    assert scene.side is not None
    shares = [scene.side.asked, *(replica.asked for replica in scene.replicas)]
    assert sorted(len(share) for share in shares) == [2, 3, 3]
    assert len({one for share in shares for one in share}) == PROBLEMS
    assert scene.reward.scored == Counter({f"v{i}": 1 for i in range(PROBLEMS)})
    assert (scene.record.problems, scene.record.by_trainer, scene.record.trainer_error) == (8, 2, "")
    assert scene.record.accuracy == 1.0  # each answer went to its own prompt
    assert scene.results == [ValidationResult(VERSION, scene.record.step, 1.0, PROBLEMS)]


def test_without_it_the_replicas_do_all() -> None:
    scene = validate(None)
    assert sum(len(replica.asked) for replica in scene.replicas) == PROBLEMS
    assert (scene.record.by_trainer, scene.record.trainer_error) == (0, "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (refuses, "the snapshot is gone"),
        (is_cancelled, "the call to validator was cancelled"),
        (forgets_one, "validator made 1 responses to 2 requests"),
        (answers_one_twice, "validator made 2 responses to 2 requests"),
        (uses_another_version, "validator made 2 responses that are not of the version"),
    ],
)
def test_what_it_does_not_do_rightly_the_replicas_do(how: Generate, reason: str) -> None:
    scene = validate(how)
    assert sum(len(replica.asked) for replica in scene.replicas) == PROBLEMS
    assert scene.reward.scored == Counter({f"v{i}": 1 for i in range(PROBLEMS)})
    record = scene.record
    assert (record.accuracy, record.by_trainer, record.trainer_error) == (1.0, 0, reason)
    assert scene.lost is None


def test_when_it_is_silent_its_process_is_reported_and_the_replicas_do_its_share() -> None:
    scene = validate(is_silent)
    assert scene.record.by_trainer == 0
    assert scene.record.trainer_error == "validator did not answer within 32 s"
    assert STALL_SECONDS / 2 < scene.record.seconds < STALL_SECONDS
    assert scene.lost == (VALIDATOR, "validator did not answer within 32 s")
