"""FullyAsyncRollouter: turns prompts into scored samples, ahead of the trainer by no more than the staleness budget.

consumes: prompts, completions; produces: samples in the message queue; waits for: admission budget, replicas, room in
the queue; unblocked by: `update_param_version` (a new window), the trainer's takes, completions.

Law: every admitted sample ends exactly once (L1): it reaches the queue, or fails with its error. No prompt is admitted
before the first published version (V5).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from pathlib import Path

import msgspec

from paceline.core.checkpoint import RollouterSnapshot, encode_rollouter
from paceline.core.config import Config
from paceline.core.errors import PacelineError
from paceline.core.events import (
    AdmissionLevel,
    EventSink,
    SampleAdmitted,
    SampleDropped,
    SampleFailed,
    ZombiesRefused,
)
from paceline.core.ports import Clock, PromptSource, QueueControl, ReplicaControl, RewardFn, TextDecoder
from paceline.core.sample import Completion, GenerationRequest, Sample, encode_sample, sample_id_of
from paceline.core.tasks import run_together
from paceline.core.waits import Waits
from paceline.rollout.admission import AdmissionBudget
from paceline.rollout.fleet import Fleet
from paceline.rollout.pause_barrier import PauseBarrier
from paceline.rollout.resumption import Resumption, training_groups
from paceline.rollout.rollouter_state import save_part
from paceline.rollout.sample_show import SampleShow
from paceline.rollout.scorer import Scorer
from paceline.rollout.usable_prompts import UsablePrompts
from paceline.rollout.validation import PREFIX, Validator

SHOW_EVERY_SECONDS = 1.0
AT_ONCE = 32  # samples that are admitted or encoded in one turn of the event loop
QUEUE_ANSWERS_SECONDS = 30.0
IN_FLIGHT_OVER_PLACES = 1.5  # requests kept ready beside those that hold a place, so that no place is ever empty


class FullyAsyncRollouter:
    """The rollout side: feeder, one exchange loop per replica, scorer, putter."""

    def __init__(
        self,
        config: Config,
        *,
        life: int,
        prompts: PromptSource,
        replicas: Sequence[ReplicaControl],
        queue: QueueControl,
        reward: RewardFn,
        decoder: TextDecoder,
        stop_token_ids: tuple[int, ...],
        clock: Clock,
        events: EventSink,
        resumption: Resumption | None = None,
    ) -> None:
        self._life = life
        self._prompts = UsablePrompts(prompts, longest=config.data.max_prompt_length, events=events)
        self._queue = queue
        self._clock = clock
        self._events = events
        self._stall_seconds = config.trainer.stall_timeout_seconds
        self._total = config.total_steps * config.required_samples
        self._rollout = config.rollout
        self._budget = AdmissionBudget(config.max_required_samples)
        self._waits = Waits(who="rollouter", clock=clock, events=events)
        self._fleet = self._fleet_of(replicas)
        self._groups = training_groups(config, stop_token_ids, resumption)
        self._validator = Validator(
            config,
            prompts=prompts.validation_prompts(),
            stop_token_ids=stop_token_ids,
            fleet=self._fleet,
            reward=reward,
            decoder=decoder,
            clock=clock,
            events=events,
        )
        self._scorer = Scorer(
            config.reward,
            life=life,
            reward=reward,
            decoder=decoder,
            on_sample=self._on_sample,
            on_failure=self._set_aside,
        )
        self._filters = config.algorithm.filter_groups.enable
        self._ready: dict[str, Sample] = {}  # scored, and not yet in the message queue
        self._scored = asyncio.Event()
        self._orphans: deque[list[GenerationRequest]] = deque()
        self._may_admit = asyncio.Event()
        self._admitted = self._failed = self._dropped = 0
        self._taken_before = self._window_taken = 0
        self._published = -1
        self._barrier = PauseBarrier(self._fleet, clock)
        self._lag_policy = config.async_training.lag_policy
        self._admitted_under: dict[str, int] = {}
        self._show = SampleShow(clock=clock, events=events)
        self._level_at = float("-inf")
        if resumption is not None:
            self._restore(resumption)

    def _fleet_of(self, replicas: Sequence[ReplicaControl]) -> Fleet:
        fleet = Fleet(
            on_completions=self._on_completions,
            on_orphans=self._on_orphans,
            waits=self._waits,
            events=self._events,
            reply_seconds=self._rollout.exchange_timeout_seconds,
            return_seconds=self._rollout.replica_return_seconds,
        )
        for replica in replicas:
            fleet.add(replica)
        return fleet

    async def fit(self) -> None:
        """Run until cancelled. The message queue learns when the last sample is in it, or why none will come."""
        try:
            await run_together(self._feed(), self._scorer.run(), self._put(), self._fleet.run())
        except PacelineError as error:
            await self._queue.fail("rollouter", error.message)
            raise

    # -- what the synchronizer drives ----------------------------------------------------------------------------------

    def get_rollout_wg(self) -> Sequence[ReplicaControl]:
        """The replicas."""
        return self._fleet.replicas()

    async def pause(self, deadline_wall: float | None = None) -> None:
        """No replica makes a decode step after this returns, until `resume`; see `PauseBarrier`. Twice is harmless."""
        await self._barrier.begin(deadline_wall)

    async def resume(self) -> None:
        """All replicas go on. Twice is harmless."""
        await self._barrier.end()

    def paused(self) -> AbstractAsyncContextManager[None]:
        """No replica makes a decode step within; whatever happens there, they go on after it."""
        return self._barrier.held()

    async def add_replica(self, replica: ReplicaControl) -> None:
        """A replica joins, or returns as a new process; it gets traffic once it has confirmed a version."""
        self._fleet.add(replica)
        await self._barrier.member_joined()

    async def remove_replica(self, replica_id: str) -> None:
        """Take a replica out; what it owed is handed over."""
        self._fleet.remove(replica_id)

    async def lose_replica(self, replica_id: str, reason: str) -> None:
        """A replica's process is gone; what it owed is handed over. Twice is harmless."""
        self._fleet.lose(replica_id, reason)

    async def next_loss(self, wait_seconds: float) -> tuple[str, str] | None:
        """The next replica that was lost and why, or None when none was in this time: for whoever starts it again."""
        return await self._fleet.next_loss(wait_seconds)

    async def confirm_replicas(self, confirmed: Mapping[str, int], fenced: Mapping[str, str]) -> None:
        """These replicas serve these versions and get traffic; those cannot be trusted until they confirm again."""
        self._fleet.fence(fenced)
        self._fleet.confirm(confirmed)
        self._may_admit.set()

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None:
        """A version is published: open its admission window, and pin it for a validation if one is asked for."""
        if validate:
            await self._validator.start(version, global_steps)
        self._published = version
        statistics = await self._queue.get_statistics()
        outstanding = self._admitted - self._failed - self._taken_before - statistics.taken
        self._budget.open_window(outstanding + self._window_taken)
        self._window_taken = 0
        self._show_admission()
        self._may_admit.set()

    async def outstanding_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        """Samples on their way to the trainer that were admitted before this version (packed) was published."""
        for sample_id in consumed:
            self._admitted_under.pop(sample_id, None)
        return [sample_id for sample_id, under in self._admitted_under.items() if under < version]

    async def samples_dropped(self, count: int) -> None:
        """The trainer dropped so many samples; others are admitted in their place."""
        self._dropped += count
        for _ in range(count):
            self._budget.give_back()
        self._may_admit.set()

    async def snapshot(self) -> bytes:
        """All that is on its way to the trainer at this moment; generation goes on."""
        groups = [*self._groups.all_open(), *self._scorer.unfinished]
        snapshot = RollouterSnapshot(
            life=self._life,
            admitted=self._admitted,
            failed=self._failed,
            dropped=self._dropped,
            prompts=msgspec.msgpack.encode(self._prompts.state()),
            groups=[group.as_open() for group in groups],
            ready=list(self._ready.values()),
            admitted_under=self._admitted_under,
        )
        return encode_rollouter(snapshot)

    async def save_checkpoint(self, local_global_step_folder: str) -> None:
        """Write the `snapshot` into this directory."""
        save_part(await self.snapshot(), Path(local_global_step_folder))

    async def wait_validations(self) -> None:
        """Return once no validation runs."""
        await self._validator.wait()

    def _restore(self, resumption: Resumption) -> None:
        """Be where an earlier life was. Nothing is sent before a replica has confirmed a version of this life."""
        snapshot = resumption.snapshot
        self._admitted, self._failed, self._dropped = snapshot.admitted, snapshot.failed, snapshot.dropped
        self._taken_before = snapshot.taken
        self._window_taken = snapshot.window_taken
        self._admitted_under = resumption.admitted_under()
        ready, lost = resumption.ready()
        for sample in ready:
            self._hand_over(sample)
        for sample in lost:
            self._failed += 1
            self._release(sample.sample_id)
            self._events.emit(SampleDropped(ids=[sample.sample_id], reason="lost_lineage"))
        for group in resumption.groups():
            if group.missing:
                self._orphans.append(self._groups.restore(group))
            else:
                self._scorer.submit(group)

    # -- the loops -----------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            admitted = self._admit_all_that_fit()
            if admitted:
                self._events.emit(SampleAdmitted(ids=admitted))
                self._show_admission()
            if len(admitted) == AT_ONCE:
                await asyncio.sleep(0)  # everybody else gets a turn in a large window
                continue
            self._may_admit.clear()
            if self._wanted <= 0:
                await self._may_admit.wait()  # nothing left to admit, unless a sample fails
                continue
            await self._waits.bounded(
                self._may_admit.wait(),
                seconds=self._stall_seconds,
                what=self._admission_wait(),
                culprit="trainer",
            )

    def _admit_all_that_fit(self) -> list[str]:
        self._send_again()
        admitted: list[str] = []
        in_flight_limit = self._in_flight_limit()
        while (
            self._wanted > 0
            and len(admitted) < AT_ONCE
            and len(self._groups) < in_flight_limit
            and self._budget.free > 0
            and (prompt := self._prompts.next_prompt()) is not None
        ):
            self._budget.admit()
            self._admitted += 1
            sample_id = sample_id_of(self._life, self._admitted)
            if self._lag_policy == "wait":
                self._admitted_under[sample_id] = self._published
            self._fleet.send(self._groups.open(sample_id, prompt))
            admitted.append(sample_id)
        return admitted

    @property
    def _wanted(self) -> int:
        """Samples that are still to be admitted for the run's total."""
        return self._total - (self._admitted - self._failed - self._dropped)

    def _in_flight_limit(self) -> int:
        ready = len(self._fleet.feeds())
        return max(ready, int(IN_FLIGHT_OVER_PLACES * ready * self._rollout.max_num_seqs) // self._rollout.n)

    def _send_again(self) -> None:
        while self._orphans and self._fleet.send(self._orphans[0]) is not None:
            self._orphans.popleft()

    def _on_orphans(self, requests: Sequence[GenerationRequest]) -> None:
        self._validator.reassign([r for r in requests if r.request_id.startswith(PREFIX)])
        again = self._groups.reissue([r for r in requests if not r.request_id.startswith(PREFIX)])
        for sample_id, fresh in again.items():
            if self._groups.losses(sample_id) >= self._rollout.max_sample_losses:
                self._groups.close(sample_id)
                self._set_aside(sample_id, f"its replica was lost {self._rollout.max_sample_losses} times")
            else:
                self._orphans.append(fresh)
        self._may_admit.set()

    def _set_aside(self, sample_id: str, error: str) -> None:
        self._failed += 1
        self._release(sample_id)
        self._events.emit(SampleFailed(ids=[sample_id], error=error))

    def _release(self, sample_id: str) -> None:
        """This sample will not reach the trainer: its place is free, and another is made for it."""
        self._admitted_under.pop(sample_id, None)
        self._budget.give_back()
        self._may_admit.set()

    def _admission_wait(self) -> str:
        if not self._fleet.feeds():
            return "a replica that has confirmed a version"
        if self._budget.free == 0:
            return f"a new version (staleness budget {self._budget.used} of {self._budget.allowed} samples used)"
        return f"completions ({len(self._groups)} samples in flight)"

    def _on_completions(self, replica_id: str, completions: Sequence[Completion]) -> None:
        training: list[Completion] = []
        for completion in completions:
            if completion.request_id.startswith(PREFIX):
                self._validator.accept(completion)
            else:
                training.append(completion)
        taken = self._groups.take(training)
        for group in taken.whole:
            self._scorer.submit(group)
        for sample_id, error in taken.refused.items():
            self._set_aside(sample_id, error)
        self._orphans.extend([request] for request in taken.again)
        if taken.zombies:
            self._events.emit(ZombiesRefused(replica=replica_id, completions=taken.zombies))
        self._may_admit.set()

    def _on_sample(self, sample: Sample) -> None:
        rewards = [response.reward for response in sample.responses]
        if self._filters and len(rewards) > 1 and max(rewards) == min(rewards):
            self._failed += 1
            self._release(sample.sample_id)
            self._events.emit(SampleDropped(ids=[sample.sample_id], reason="zero_variance"))
        else:
            self._hand_over(sample)

    def _hand_over(self, sample: Sample) -> None:
        self._ready[sample.sample_id] = sample
        self._scored.set()

    async def _put(self) -> None:
        delivered = self._taken_before
        while True:
            while not self._ready:
                self._scored.clear()
                await self._scored.wait()
            samples = list(islice(self._ready.values(), AT_ONCE))
            await self._waits.bounded(
                self._queue.put_samples([encode_sample(sample) for sample in samples]),
                seconds=self._stall_seconds + QUEUE_ANSWERS_SECONDS,  # the queue itself says when there is no room
                what="the message queue to take samples",
                culprit="message queue",
            )
            for sample in samples:
                del self._ready[sample.sample_id]
            delivered += len(samples)
            self._show.show(samples[-1])
            # With the policy drop, a dropped sample is made again, however late.
            if delivered >= self._total and self._lag_policy != "drop":
                await self._queue.finish("rollouter")

    # -- what people see -----------------------------------------------------------------------------------------------

    def _show_admission(self) -> None:
        if self._clock.now() - self._level_at < SHOW_EVERY_SECONDS:
            return
        self._level_at = self._clock.now()
        self._events.emit(
            AdmissionLevel(used=self._budget.used, allowed=self._budget.allowed, in_flight=len(self._groups))
        )
