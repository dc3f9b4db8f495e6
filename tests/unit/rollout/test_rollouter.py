"""The rollouter against fake replicas and a real queue: admission, failures, ends; on the virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from paceline.core.checkpoint import decode_rollouter
from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.config import Config, build_config
from paceline.core.errors import ProducerFailed, QueueClosed, RewardError, WorkerDied
from paceline.core.events import (
    ReplicaChanged,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    ValidationFinished,
    ValidationSkipped,
    ValidationStarted,
)
from paceline.core.ports import PromptSource, RewardFn
from paceline.core.sample import Completion, Prompt, Sample, decode_sample
from paceline.message_queue import MessageQueue
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica
from paceline.testing.virtual_clock import VirtualClock, run_virtual


class EchoReplica(RecordingReplica):
    """Finishes every request 0.1 s after it came."""

    def __init__(self, clock: VirtualClock, replica_id: str) -> None:
        super().__init__(CallLog(), replica_id)
        self.clock = clock
        self.taken = 0
        self.dead = False
        self.hold_validation = asyncio.Event()
        self.hold_validation.set()

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await self.clock.sleep(0.1)
        if self.dead:
            raise WorkerDied(f"{self.replica_id} died", self.replica_id)
        if any(r.pinned_version is not None for r in request.requests):
            await self.hold_validation.wait()
        self.taken += len(request.requests)
        done = [Completion(r.request_id, [7], [-0.1], [r.pinned_version or 0], "stop") for r in request.requests]
        return ExchangeReply(batch=self.taken, completions=done, running=0, waiting=0)


class Cursor(msgspec.Struct):
    given: int


class Prompts:
    def __init__(self) -> None:
        self.given = 0

    def next_prompt(self) -> Prompt:
        self.given += 1
        return Prompt(str(self.given), f"prompt {self.given}", (1,), "", "t")

    def validation_prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"v{i}", "?", (1,), "", "t") for i in range(5)]

    def state(self) -> msgspec.Struct:
        return Cursor(self.given)


class Decoder:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "x"


class PickyReward:
    """Fails for prompt 3."""

    async def score(self, prompt: Prompt, response_text: str) -> float:
        if prompt.prompt_id == "3":
            raise RewardError("reward failed for prompt 3")
        return 1.0


class Rig:
    def __init__(
        self, clock: VirtualClock, config: Config, reward: RewardFn, prompts: PromptSource | None = None
    ) -> None:
        self.clock = clock
        self.prompts = prompts or Prompts()
        self.config = config
        self.events = RecordingEvents()
        self.queue = MessageQueue(
            capacity=100, producers=["rollouter"], put_timeout_seconds=60, clock=clock, events=RecordingEvents()
        )
        self.replicas = [EchoReplica(clock, f"replica-{i}") for i in range(2)]
        self.rollouter = FullyAsyncRollouter(
            config,
            life=1,
            prompts=self.prompts,
            replicas=self.replicas,
            queue=self.queue,
            reward=reward,
            decoder=Decoder(),
            stop_token_ids=(),
            clock=clock,
            events=self.events,
        )

    async def publish(self, version: int, validate: bool = False) -> None:
        await self.rollouter.confirm_replicas({replica.replica_id: version for replica in self.replicas}, {})
        await self.rollouter.update_param_version(version, validate, 0, False)

    def admitted(self) -> int:
        return sum(len(event.ids) for event in self.events.of(SampleAdmitted))


def config(total: int = 40, threshold: float = 0.0, places: int = 64, filter_groups: bool = False) -> Config:
    return build_config(
        {
            "algorithm": {"filter_groups": {"enable": filter_groups}},
            "actor": {"ppo_mini_batch_size": 8},
            "async_training": {"staleness_threshold": threshold, "trigger_parameter_sync_step": 1},
            "rollout": {"n": 2, "total_rollout_steps": total, "max_num_seqs": places},
        }
    )


def with_rig(
    scenario: Callable[[Rig], Awaitable[None]],
    chosen: Config | None = None,
    reward: RewardFn | None = None,
    prompts: PromptSource | None = None,
) -> None:
    async def main(clock: VirtualClock) -> None:
        rig = Rig(clock, chosen or config(), reward or PickyReward(), prompts)
        fitting = asyncio.ensure_future(rig.rollouter.fit())
        try:
            async with asyncio.timeout(500):
                await scenario(rig)
        finally:
            fitting.cancel()
            await asyncio.gather(fitting, return_exceptions=True)

    run_virtual(main)


def test_nothing_is_admitted_before_the_first_version() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.clock.sleep(5)
        assert rig.admitted() == 0
        await rig.publish(0)
        await rig.clock.sleep(1)
        assert rig.admitted() == 9  # 8, and one in place of prompt 3, whose reward fails

    with_rig(scenario)


def test_the_window_counts_what_the_trainer_has_not_taken() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        await rig.clock.sleep(1)
        await rig.queue.get_samples(5, 1.0)
        await rig.publish(1)
        await rig.clock.sleep(1)
        assert rig.admitted() == 9 + 5  # 3 of the first 8 are still queued

    with_rig(scenario)


def test_the_staleness_threshold_widens_the_window() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        await rig.clock.sleep(1)
        assert rig.admitted() == 12 + 1

    with_rig(scenario, config(threshold=0.5))


def test_few_places_bound_what_is_in_flight() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        await rig.clock.sleep(0.05)
        assert rig.admitted() == 3  # 1.5 times 2 replicas of 2 places, in groups of 2

    with_rig(scenario, config(places=2))


def test_a_failed_reward_fails_its_sample_alone_and_the_total_is_reached() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        taken = await train_to_the_end(rig)
        assert len(taken) == 40
        assert "3" not in {sample.prompt.prompt_id for sample in taken}
        assert len({sample.sample_id for sample in taken}) == 40
        assert [event.ids for event in rig.events.of(SampleFailed)] == [["1-3"]]
        assert all(len(sample.responses) == 2 for sample in taken)

    with_rig(scenario)


async def train_to_the_end(rig: Rig) -> list[Sample]:
    """Take batches of 8 and publish after each, until the queue ends."""
    taken: list[Sample] = []
    for version in range(1, 100):
        try:
            items, _ = await rig.queue.get_samples(8, 30.0)
        except QueueClosed:
            return taken
        taken += [decode_sample(item) for item in items]
        await rig.publish(version)
    raise AssertionError("the queue did not end")


def test_samples_of_a_dead_replica_are_done_by_the_others_once() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[1].dead = True
        await rig.publish(0)
        taken = await train_to_the_end(rig)
        assert len({sample.sample_id for sample in taken}) == len(taken) == 40
        assert [e.replica for e in rig.events.of(ReplicaChanged) if e.state == "lost"] == ["replica-1"]

    with_rig(scenario)


def test_with_no_replica_left_the_run_fails_and_names_them_all() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.dead = True
        await rig.publish(0)
        with pytest.raises(ProducerFailed, match=r"no replica is left \(replica-0: replica-0 died; replica-1: rep"):
            await rig.queue.get_samples(8, 100.0)

    with_rig(scenario)


def test_a_replica_that_returns_in_time_saves_the_run() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.dead = True
        await rig.publish(0)
        await rig.clock.sleep(20)
        fresh = EchoReplica(rig.clock, "replica-0")
        await rig.rollouter.add_replica(fresh)
        await rig.clock.sleep(5)
        assert fresh.taken == 0  # no traffic before its first confirmed version
        rig.replicas[:] = [fresh]
        await rig.publish(1)
        taken = await train_to_the_end(rig)
        assert len({sample.sample_id for sample in taken}) == len(taken) == 40

    with_rig(scenario)


def test_a_sample_that_loses_replica_after_replica_is_set_aside() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.dead = True
        for round_number in range(3):
            await rig.publish(round_number)
            await rig.clock.sleep(5)
            for replica in rig.replicas:
                await rig.rollouter.add_replica(replica)
        failed = {i: event.error for event in rig.events.of(SampleFailed) for i in event.ids}
        assert failed["1-1"] == "its replica was lost 3 times"

    with_rig(scenario)


def test_a_fenced_replica_gets_nothing_until_it_confirms_again() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.rollouter.confirm_replicas({"replica-0": 0}, {"replica-1": "digest differs"})
        await rig.rollouter.update_param_version(0, False, 0, False)
        await rig.clock.sleep(1)
        assert rig.replicas[1].taken == 0
        assert rig.replicas[0].taken > 0
        await rig.publish(1)
        await rig.queue.get_samples(8, 1.0)
        await rig.publish(2)
        await rig.clock.sleep(1)
        assert rig.replicas[1].taken > 0

    with_rig(scenario)


def test_a_validation_survives_the_loss_of_one_replica() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        await rig.clock.sleep(1)
        rig.replicas[1].dead = True
        await rig.publish(1, validate=True)
        await rig.rollouter.wait_validations()
        assert [(e.version, e.problems) for e in rig.events.of(ValidationFinished)] == [(1, 5)]

    with_rig(scenario)


def test_pause_and_resume_reach_every_replica() -> None:
    async def scenario(rig: Rig) -> None:
        logs = [CallLog(), CallLog()]
        for replica, log in zip(rig.replicas, logs, strict=True):
            replica.log = log
        await rig.rollouter.pause()
        await rig.rollouter.resume()
        assert [log.names() for log in logs] == [[f"replica-{i}.pause", f"replica-{i}.resume"] for i in range(2)]

    with_rig(scenario)


def test_one_validation_record_per_requested_version() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].hold_validation.clear()
        await rig.publish(0, validate=True)
        await rig.clock.sleep(1)
        await rig.publish(1, validate=True)
        rig.replicas[0].hold_validation.set()
        await rig.rollouter.wait_validations()
        await rig.publish(2, validate=True)
        await rig.rollouter.wait_validations()
        assert [event.version for event in rig.events.of(ValidationStarted)] == [0, 2]
        assert [(event.version, event.accuracy) for event in rig.events.of(ValidationFinished)] == [(0, 1.0), (2, 1.0)]
        assert [(e.version, e.reason) for e in rig.events.of(ValidationSkipped)] == [(1, "pin limit")]

    with_rig(scenario)


def test_the_rollouters_part_of_a_checkpoint_is_one_whole_file(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        await rig.clock.sleep(1)
        await rig.rollouter.save_checkpoint(str(tmp_path / "global_step_1"))
        saved = decode_rollouter((tmp_path / "global_step_1" / "rollouter.msgpack").read_bytes())
        assert (saved.life, saved.admitted, saved.failed) == (1, 9, 1)
        assert msgspec.msgpack.decode(saved.prompts) == {"given": 9}

    with_rig(scenario)


class HostileReward:
    """Prompt 2 hangs, 3 raises, 4 returns nothing, 5 is not a number; the rest is fine."""

    async def score(self, prompt: Prompt, response_text: str) -> float:
        number = int(prompt.prompt_id) if prompt.prompt_id.isdigit() else 0
        if number == 2:
            await asyncio.Event().wait()
        if number == 3:
            raise ValueError("boom")
        return {4: None, 5: float("nan")}.get(number, 1.0)  # type: ignore[return-value]


def test_a_hostile_reward_costs_its_own_samples_alone() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        taken = await train_to_the_end(rig)
        assert len({sample.sample_id for sample in taken}) == len(taken) == 40
        failed = {event.ids[0]: event.error for event in rig.events.of(SampleFailed)}
        assert failed == {
            "1-2": "reward: no answer within 30 s",
            "1-3": "reward: ValueError: boom",
            "1-4": "reward: None is not a finite number",
            "1-5": "reward: nan is not a finite number",
        }

    with_rig(scenario, reward=HostileReward())


def test_groups_without_variance_are_dropped_and_made_again() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publish(0)
        taken = await train_to_the_end(rig)
        assert len(taken) == 40
        assert all(sample.responses[0].reward != sample.responses[1].reward for sample in taken)
        dropped = rig.events.of(SampleDropped)
        assert {event.reason for event in dropped} == {"zero_variance"}

    with_rig(scenario, config(filter_groups=True), reward=EveryThirdEqual())


class EveryThirdEqual:
    """The two responses of every third prompt get the same reward, the others different ones."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._calls[prompt.prompt_id] += 1
        return 1.0 if int(prompt.prompt_id) % 3 == 0 else float(self._calls[prompt.prompt_id] % 2)
