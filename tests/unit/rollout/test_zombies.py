"""What a fenced replica delivers late is refused and counted; what it owed is done once, by another."""

from __future__ import annotations

import asyncio
from collections import Counter

from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.config import build_config
from paceline.core.events import SampleAdmitted, ZombiesRefused
from paceline.core.sample import Completion, GenerationRequest, decode_sample
from paceline.message_queue import MessageQueue
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.testing.marker_task import EndlessPrompts, LengthReward, NumberDecoder
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica
from paceline.testing.virtual_clock import VirtualClock
from tests.unit.rollout.test_rollouter import Rig, with_rig


class KeepingReplica(RecordingReplica):
    """Finishes what it has once it is `open`; keeps what is finished until it is acknowledged, as an outbox does."""

    def __init__(self, clock: VirtualClock, name: str) -> None:
        super().__init__(CallLog(), name)
        self.clock = clock
        self.is_open = True
        self.running: list[GenerationRequest] = []
        self.kept: list[tuple[int, Completion]] = []
        self.last = 0

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await self.clock.sleep(0.1)
        self.kept = [one for one in self.kept if one[0] > request.acknowledged]
        self.running += request.requests
        if self.is_open:
            for one in self.running:
                self.last += 1
                self.kept.append((self.last, Completion(one.request_id, [7], [-0.1], [0], "stop")))
            self.running = []
        done = [completion for _, completion in self.kept]
        return ExchangeReply(batch=self.last, completions=done, running=len(self.running), waiting=0)


def test_late_responses_of_a_fenced_replica_are_refused_and_counted() -> None:
    async def scenario(rig: Rig) -> None:
        clock, events = rig.clock, RecordingEvents()
        good, slow = KeepingReplica(clock, "good"), KeepingReplica(clock, "slow")
        slow.is_open = False
        queue = MessageQueue(
            capacity=100, producers=["rollouter"], put_timeout_seconds=60, clock=clock, events=RecordingEvents()
        )
        rollouter = FullyAsyncRollouter(
            build_config(
                {
                    "actor": {"ppo_mini_batch_size": 8},
                    "async_training": {"staleness_threshold": 0.0, "trigger_parameter_sync_step": 1},
                    "rollout": {"n": 2, "total_rollout_steps": 16},
                }
            ),
            life=1,
            prompts=EndlessPrompts(),
            replicas=[good, slow],
            queue=queue,
            reward=LengthReward(),
            decoder=NumberDecoder(),
            stop_token_ids=(),
            clock=clock,
            events=events,
        )
        fitting = asyncio.ensure_future(rollouter.fit())
        await rollouter.confirm_replicas({"good": 0, "slow": 0}, {})
        await rollouter.update_param_version(0, False, 0, False)
        await clock.sleep(1)
        owed = len(slow.running)
        assert owed > 0
        await rollouter.confirm_replicas({}, {"slow": "digest differs"})
        slow.is_open = True
        await clock.sleep(1)
        items, _ = await queue.get_samples(100, 1.0)
        assert len(items) == 8  # the other has done all of it
        await rollouter.confirm_replicas({"slow": 1}, {})
        await rollouter.update_param_version(1, False, 0, False)
        await clock.sleep(1)
        fitting.cancel()
        items += (await queue.get_samples(100, 1.0))[0]
        filed = Counter(decode_sample(item).sample_id for item in items)
        assert filed == Counter({sample: 1 for event in events.of(SampleAdmitted) for sample in event.ids})
        assert sum(event.completions for event in events.of(ZombiesRefused)) == owed

    with_rig(scenario)
