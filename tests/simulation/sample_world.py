"""The samples' side of a run on the virtual clock, moved by hand: the production rollouter, message queue, batcher, lag
gate and cut, with replicas that decode on demand and a trainer that updates on demand. A crash drops all of it; the
next life begins from the last cut and from what token journals would have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from paceline.core.checkpoint import JournalledSequence, RollouterSnapshot, decode_rollouter
from paceline.core.commands import QueueStatistics, RolloutStatistics
from paceline.core.config import Config, build_config
from paceline.core.events import Event, RunResumed, RunStarted, SampleTrained
from paceline.core.sample import Prompt, Sample, decode_sample
from paceline.core.version import Lineage, Version
from paceline.message_queue import MessageQueue
from paceline.observability.ledger import Ledger
from paceline.observability.lives import split_lives
from paceline.observability.reader import Record
from paceline.rollout.prompt_dataset import DatasetCursor, PromptDataset
from paceline.rollout.resumption import Resumption
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, VirtualLoop
from paceline.train.batcher import Batcher
from paceline.train.checkpoint import merge_cut
from paceline.train.lag_gate import LagGate
from paceline.train.staleness import token_lags
from tests.simulation.hand_replica import HandReplica

T = TypeVar("T")
SETTLED_SECONDS = 0.3


class MoodyReward:
    """Different rewards within a group, but for what `moods` holds for the next calls."""

    def __init__(self) -> None:
        self.moods: list[object] = []
        self._calls = 0

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._calls += 1
        mood = self.moods.pop(0) if self.moods else float(self._calls)
        if isinstance(mood, Exception):
            raise mood
        return mood  # type: ignore[return-value]


class Blank:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "x"


@dataclass(frozen=True)
class Cut:
    """A checkpoint in memory."""

    snapshot: RollouterSnapshot
    lineage: Lineage
    version: Version
    step: int
    since_sync: int


@dataclass(frozen=True)
class Trained:
    """One sample of one update."""

    sample: Sample
    step: int
    captured: Version
    mask: list[list[int]]


class SampleWorld:
    """A run of several lives. Every method ends when all loops wait for what the next one may do."""

    def __init__(self, settings: dict[str, Any], *, queue_capacity: int | None = None, prompts: int = 7) -> None:
        self.settings = settings
        self._loop = VirtualLoop()
        self._queue_capacity = queue_capacity
        self._prompts = prompts
        self.events: list[Event] = []
        self.trained: list[Trained] = []
        self.cut: Cut | None = None
        self.life = 0
        self.reward = MoodyReward()
        self.captured: Version | None = None
        self.published: Version | None = None
        self.step = self.since_sync = 0
        self._has_captured = False
        self._left_urgent = False  # the last update before the sync left samples that may not be carried over it
        self._batch: asyncio.Future[list[Sample] | None] | None = None
        self._journals: list[JournalledSequence] = []
        self._children: dict[tuple[int, int], list[int]] = {}
        self._begin()

    # -- what a test reads ----------------------------------------

    @property
    def config(self) -> Config:
        return build_config(self.settings)

    @property
    def ledger(self) -> Ledger:
        return Ledger(split_lives(Record(0.0, "", 0, event) for event in [*self.events, *self.sink.events]))  # type: ignore[arg-type]

    def statistics(self) -> tuple[RolloutStatistics, QueueStatistics]:
        """Of the rollouter and of the message queue, at one moment."""

        async def ask() -> tuple[RolloutStatistics, QueueStatistics]:
            return await self.rollouter.get_statistics(), await self.queue.get_statistics()

        return self._run(ask())

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for a batch."""
        return self._batch is not None

    @property
    def may_capture(self) -> bool:
        due = self.since_sync >= self.config.async_training.trigger_parameter_sync_step and not self._left_urgent
        return not self.is_waiting and self.published == self.captured and (due or self.captured is None)

    @property
    def may_train(self) -> bool:
        return self.captured is not None and not self.is_waiting and not self.is_over and not self.must_capture

    @property
    def must_capture(self) -> bool:
        """The trainer captures before its next update."""
        return self.since_sync >= self.config.async_training.trigger_parameter_sync_step and not self._left_urgent

    @property
    def may_save(self) -> bool:
        """The trainer stands between two updates, and there is no checkpoint of this one."""
        is_new = self.cut is None or self.cut.step != self.step
        return self.captured is not None and not self.is_waiting and not self.must_capture and is_new

    @property
    def is_over(self) -> bool:
        return self.step >= self.config.total_steps

    def held(self) -> list[tuple[HandReplica, str]]:
        """Every request that a living replica holds."""
        return [(replica, one) for replica in self.replicas if not replica.is_dead for one in replica.held]

    # -- what a test does ----------------------------------------

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this to its end."""
        return self._run(work)

    def settle(self, seconds: float = SETTLED_SECONDS) -> None:
        """Let everybody do what they can."""
        self._run(asyncio.sleep(seconds))
        self._harvest()

    def capture(self) -> None:
        """The trainer takes a snapshot of its weights."""
        n = self.lineage.begin if self.captured is None else self.captured.n + 1
        self.captured = Version(self.life, n)
        self.since_sync = 0 if self._has_captured else self.since_sync
        self._has_captured = True
        trained = self.step * self.config.required_samples
        is_first = self.captured.n == self.lineage.begin  # the version of the cut, captured when it was due
        self.trained_at[self.captured] = trained - (self.since_sync * self.config.required_samples if is_first else 0)
        self._run(self.rollouter.version_captured(self.captured.packed, trained))

    def publish(self) -> None:
        """All replicas confirm the captured version; then it is published."""
        assert self.captured is not None
        self._run(self._publish(self.captured))
        self.settle()

    def train(self) -> None:
        """The trainer asks for its next batch; it is trained as soon as it is whole."""
        self._batch = asyncio.ensure_future(self._next_batch(), loop=self._loop)
        self.settle()

    def lose(self, index: int) -> None:
        """A replica dies; a new one takes its place, without a version."""
        self.replicas[index].is_dead = True
        self._journals += self.replicas[index].journal(self.life)
        self.settle()
        self.replicas[index] = HandReplica(f"replica-{index}")
        self._run(self.rollouter.add_replica(self.replicas[index]))
        if self.published is not None:  # it catches up
            self._run(self._confirm(self.published))
        self.settle()

    def save(self) -> None:
        """A checkpoint: the trainer stands between two updates."""
        assert self.captured is not None
        self.cut = self._run(self._take_cut(self.captured))

    def crash(self) -> None:
        """`kill -9` of everything, then the next life."""
        for replica in self.replicas:
            self._journals += replica.journal(self.life)
        self._end()
        self._begin()

    def close(self) -> None:
        """End the loop."""
        self._end()
        self._loop.close()

    # -- inside ----------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def _begin(self) -> None:
        self.life += 1
        if self.cut is None and self.life > 1:  # nothing is left of it: another run begins
            self.life, self.trained, self.events, self._journals = 1, [], [], []
        self.sink = RecordingEvents()
        self.sink.emit(
            RunStarted(run_id="r", life=self.life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=0)
        )
        self.lineage = Lineage(self.life)
        self.step = self.since_sync = 0
        self.captured = self.published = self._batch = None
        self.trained_at: dict[Version, int] = {}
        self._has_captured = self._left_urgent = False
        self.restored = 0
        self._run(self._build())
        self.settle()

    async def _build(self) -> None:
        config, clock = self.config, VirtualClock()
        train = [Prompt(f"p{i}", "?", (i, 2, 3), "", "t") for i in range(self._prompts)]
        prompts = PromptDataset(train=train, validation=train[:1], seed=config.data.seed)
        resumption = None if self.cut is None else self._resumption(self.cut, prompts)
        self.queue = MessageQueue(
            capacity=self._queue_capacity or config.max_required_samples,
            producers=["rollouter"],
            put_timeout_seconds=1e9,
            clock=clock,
            events=RecordingEvents(),
        )
        self.replicas = [HandReplica(f"replica-{i}") for i in range(config.rollout.num_replicas)]
        self.rollouter = FullyAsyncRollouter(
            config,
            life=self.life,
            prompts=prompts,
            replicas=list(self.replicas),
            queue=self.queue,
            reward=self.reward,
            decoder=Blank(),
            stop_token_ids=(),
            clock=clock,
            events=self.sink,
            resumption=resumption,
        )
        self.gate = LagGate(config.async_training, self.rollouter, self.lineage)
        self.batcher = Batcher(
            queue=self.queue,
            life=self.life,
            required_samples=config.required_samples,
            stall_seconds=1e9,
            clock=clock,
            events=self.sink,
            on_refused=self.gate.refused,
        )
        self._fitting = asyncio.ensure_future(self.rollouter.fit())

    def _resumption(self, cut: Cut, prompts: PromptDataset) -> Resumption:
        n = cut.version.n
        siblings = self._children.setdefault((cut.lineage.life, cut.step), [])
        self.lineage = cut.lineage.child(self.life, left_at=n, begin=n, siblings=siblings)
        siblings.append(self.life)
        self.step, self.since_sync = cut.step, cut.since_sync
        self._left_urgent = self.must_capture
        self.trained = [one for one in self.trained if one.step <= cut.step]
        prompts.restore(msgspec.msgpack.decode(cut.snapshot.prompts, type=DatasetCursor))
        self.restored = len(cut.snapshot.open_ids)
        self.sink.emit(
            RunResumed(
                from_life=cut.lineage.life,
                step=cut.step,
                version=cut.version.packed,
                admitted=cut.snapshot.admitted,
                restored=cut.snapshot.open_ids,
                refused=[],
            )
        )
        return Resumption(cut.snapshot, self.lineage, self._journals)

    def _end(self) -> None:
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._run(asyncio.wait(left))
        self.events += self.sink.events

    async def _confirm(self, version: Version) -> None:
        for replica in self.replicas:
            replica.version = version.packed
        await self.rollouter.confirm_replicas({replica.replica_id: version.packed for replica in self.replicas}, {})

    async def _publish(self, version: Version) -> None:
        await self._confirm(version)
        await self.queue.update_param_version(version.packed)
        await self.rollouter.update_param_version(version.packed, False, self.step, False)
        self.published = version

    async def _next_batch(self) -> list[Sample] | None:
        captured = self.captured
        assert captured is not None
        last_before_sync = self.since_sync + 1 >= self.config.async_training.trigger_parameter_sync_step
        urgent = await self.gate.urgent_before(captured.next()) if last_before_sync else []
        self._left_urgent = len(urgent) > self.config.required_samples

        async def still_urgent() -> list[str]:
            return await self.gate.urgent_before(captured.next())

        return await self.batcher.next_batch(urgent, lambda one: self.gate.refuses(one, captured), still_urgent)

    def _harvest(self) -> None:
        if self._fitting.done():
            self._fitting.result()
        if self._batch is None or not self._batch.done():
            return
        batch, self._batch = self._batch.result(), None
        assert batch is not None, "the data ended before the last update"
        assert self.captured is not None
        captured = self.captured
        lags = token_lags(batch, captured, self.lineage)
        self.step += 1
        self.since_sync += 1
        self.gate.consumed(batch)
        ids = [sample.sample_id for sample in batch]
        self.sink.emit(SampleTrained(ids=ids, step=self.step, version=captured.packed, lags=lags))
        for sample in batch:
            masks = [self.gate.loss_mask(response, captured) for response in sample.responses]
            self.trained.append(Trained(sample, self.step, captured, masks))

    async def _take_cut(self, version: Version) -> Cut:
        snapshot = decode_rollouter(await self.rollouter.snapshot())
        queued = [decode_sample(item) for item in await self.queue.peek_samples()]
        arrived = [*self.batcher.held, *queued]
        cut = merge_cut(snapshot, arrived, self.since_sync * self.config.required_samples)
        return Cut(cut, self.lineage, version, self.step, self.since_sync)

    def prompts_trained(self) -> Counter[str]:
        """How often each prompt of each epoch was trained in the surviving lineage."""
        return Counter(one.sample.prompt.prompt_id for one in self.trained)
