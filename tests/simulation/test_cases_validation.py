"""Case C23: a validation that still runs when the next syncs come.

The rule: a validation pins the version that it was asked for; a request beyond the pins that may be held is a record
too (`pin limit`), and so is one that fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.config import build_config
from paceline.core.errors import RewardError
from paceline.core.events import SampleAdmitted, ValidationFinished, ValidationSkipped
from paceline.core.sample import Completion, GenerationRequest, Prompt, decode_sample
from paceline.message_queue import MessageQueue
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.testing.marker_task import EndlessPrompts
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica
from paceline.testing.virtual_clock import VirtualClock, run_virtual


class GatedReplica(RecordingReplica):
    """Finishes training requests at once, those of a pinned version when its gate is open; the text is the version."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(CallLog(), "replica-0")
        self.clock = clock
        self.shut: set[int] = set()
        self.held: list[GenerationRequest] = []
        self.live = 0
        self.batch = 0

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await self.clock.sleep(0.01)
        self.held.extend(request.requests)
        ready = [one for one in self.held if one.pinned_version not in self.shut]
        self.held = [one for one in self.held if one.pinned_version in self.shut]
        self.batch += len(ready)
        done = [self._done(one) for one in ready]
        return ExchangeReply(batch=self.batch, completions=done, running=len(self.held), waiting=0)

    def _done(self, one: GenerationRequest) -> Completion:
        version = self.live if one.pinned_version is None else one.pinned_version
        return Completion(one.request_id, [1000 * version], [-float(version)], [version], "stop")


class VersionReward:
    """The version that made the response is its score; version 2 cannot be scored in a validation."""

    async def score(self, prompt: Prompt, response_text: str) -> float:
        version = int(response_text)
        if prompt.prompt_id.startswith("v") and version == 2:
            raise RewardError("no score for version 2")
        return float(version)


class VersionDecoder:
    """The marker of the first token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(token_ids[0] // 1000)


class FourValidationPrompts(EndlessPrompts):
    """Four of them."""

    def validation_prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"v{i}", "?", (1, 2), "", "t") for i in range(4)]


class Run:
    """A rollouter over one gated replica."""

    def __init__(self, clock: VirtualClock, pins: int) -> None:
        self.clock = clock
        self.events = RecordingEvents()
        self.replica = GatedReplica(clock)
        self.queue = MessageQueue(
            capacity=100, producers=["rollouter"], put_timeout_seconds=60, clock=clock, events=RecordingEvents()
        )
        self.rollouter = FullyAsyncRollouter(
            build_config(
                {
                    "actor": {"ppo_mini_batch_size": 4},
                    "async_training": {"staleness_threshold": 0.0, "trigger_parameter_sync_step": 1},
                    "rollout": {"n": 2, "total_rollout_steps": 400, "max_pinned_versions": pins},
                }
            ),
            life=1,
            prompts=FourValidationPrompts(),
            replicas=[self.replica],
            queue=self.queue,
            reward=VersionReward(),
            decoder=VersionDecoder(),
            stop_token_ids=(),
            clock=clock,
            events=self.events,
        )

    async def sync(self, version: int, step: int) -> None:
        """The replica serves a version, it is published and a validation of it is asked for."""
        self.replica.live = version
        await self.rollouter.confirm_replicas({"replica-0": version}, {})
        await self.rollouter.update_param_version(version, True, step, False)
        await self.clock.sleep(0.5)

    def records(self) -> Counter[int]:
        """Records per version."""
        return Counter(
            [event.version for event in self.events.of(ValidationFinished)]
            + [event.version for event in self.events.of(ValidationSkipped)]
        )


def with_run(scenario: Callable[[Run], Awaitable[None]], pins: int) -> None:
    async def main(clock: VirtualClock) -> None:
        run = Run(clock, pins)
        fitting = asyncio.ensure_future(run.rollouter.fit())
        async with asyncio.timeout(10):
            await scenario(run)
        fitting.cancel()
        await asyncio.gather(fitting, return_exceptions=True)

    run_virtual(main)


async def five_versions(run: Run) -> None:
    """Versions 1 to 5; the validation of 1 lasts three syncs, those of 4 and 5 end in one step."""
    run.replica.shut = {1, 4, 5}
    for version in (1, 2, 3):
        await run.sync(version, step=version)
    await run.sync(4, step=4)
    run.replica.shut = {4, 5}
    await run.clock.sleep(0.5)
    await run.sync(5, step=5)
    run.replica.shut = set()
    await run.rollouter.wait_validations()


def test_c23_one_record_per_version_of_that_version_and_none_blocks() -> None:
    async def scenario(run: Run) -> None:
        await five_versions(run)
        assert run.records() == dict.fromkeys(range(1, 6), 1)
        assert {event.version: event.accuracy for event in run.events.of(ValidationFinished)} == {
            1: 1,
            3: 3,
            4: 4,
            5: 5,
        }
        assert {event.version: event.step for event in run.events.of(ValidationFinished)} == {1: 1, 3: 3, 4: 4, 5: 5}
        (failed,) = run.events.of(ValidationSkipped)
        assert (failed.version, failed.reason) == (2, "failed: no score for version 2")

    with_run(scenario, pins=5)


def test_c23_training_goes_on_and_never_sees_a_validation() -> None:
    async def scenario(run: Run) -> None:
        await five_versions(run)
        admitted = [sample for event in run.events.of(SampleAdmitted) for sample in event.ids]
        items, _ = await run.queue.get_samples(100, 1.0)
        samples = [decode_sample(item) for item in items]
        assert [sample.sample_id for sample in samples] == admitted  # the window of 4 stays full, since nobody takes
        assert len(samples) == 4
        assert all(sample.prompt.prompt_id.startswith("p") for sample in samples)

    with_run(scenario, pins=5)


def test_c23_beyond_the_pins_a_request_is_a_record_too() -> None:
    async def scenario(run: Run) -> None:
        await five_versions(run)
        assert run.records() == dict.fromkeys(range(1, 6), 1)
        skipped = {event.version: event.reason for event in run.events.of(ValidationSkipped)}
        assert skipped == {2: "pin limit", 3: "pin limit", 4: "pin limit"}
        assert {event.version for event in run.events.of(ValidationFinished)} == {1, 5}

    with_run(scenario, pins=1)
