"""FullyAsyncRollouter: turns prompts into scored samples, ahead of the trainer by no more than the staleness budget.

consumes: prompts, completions; produces: samples in the message queue; waits for: admission budget, replicas, room in
the queue; unblocked by: `update_param_version` (a new window), the trainer's takes, completions.

Law: every admitted sample ends exactly once (L1): it reaches the queue, or fails with its error. No prompt is admitted
before the first published version (V5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from paceline.core.checkpoint import RollouterSnapshot, encode_rollouter
from paceline.core.commands import RolloutStatistics
from paceline.core.config import Config
from paceline.core.errors import PacelineError
from paceline.core.events import EventSink, GroupReduced, SampleAdmitted, ZombiesRefused
from paceline.core.ports import Clock, PromptSource, QueueControl, ReplicaControl, RewardFn, TextDecoder, TrainerSide
from paceline.core.sample import Completion, GenerationRequest, Prompt, Sample, response_lengths
from paceline.core.tasks import run_together
from paceline.core.waits import Waits
from paceline.rollout.admission_show import AdmissionShow
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.fleet import Fleet
from paceline.rollout.groups import GivenUp, Group
from paceline.rollout.orphans import Orphans
from paceline.rollout.outstanding import Outstanding
from paceline.rollout.pause_barrier import PauseBarrier
from paceline.rollout.putter import AT_ONCE, Putter
from paceline.rollout.resumption import Resumption, training_groups
from paceline.rollout.rollouter_state import save_part
from paceline.rollout.sample_deadlines import SampleDeadlines
from paceline.rollout.sample_endings import SampleEndings
from paceline.rollout.sample_show import SampleShow
from paceline.rollout.scorer import Scorer
from paceline.rollout.usable_prompts import UsablePrompts
from paceline.rollout.validation import PREFIX, Validator

SAMPLE_TIMEOUT = "sample_timeout"
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
        trainer_side: TrainerSide | None = None,
    ) -> None:
        self._life = life
        self._prompts = UsablePrompts(prompts, longest=config.data.max_prompt_length, events=events)
        self._queue = queue
        self._clock = clock
        self._events = events
        self._stall_seconds = config.trainer.stall_timeout_seconds
        self._rollout = config.rollout
        total = config.total_steps * config.required_samples
        self._outstanding = Outstanding(
            life=life, total=total, required=config.required_samples, allowed=config.max_required_samples
        )
        self._waits = Waits(who="rollouter", clock=clock, events=events)
        self._fleet = self._new_fleet(config, replicas)
        self._may_admit = asyncio.Event()
        self._deadlines = SampleDeadlines(config.rollout.sample_timeout_seconds, clock=clock)
        self._endings = SampleEndings(self._outstanding, self._deadlines, events=events, on_free=self._may_admit.set)
        self._groups = training_groups(config, stop_token_ids, resumption)
        bounded = BoundedReward(config.reward, reward)
        self._validator = self._new_validator(config, prompts.validation_prompts(), stop_token_ids, bounded, decoder)
        self._trainer_side = trainer_side
        self._scorer = Scorer(
            life=life,
            reward=bounded,
            decoder=decoder,
            policy=config.rollout.group_policy,
            on_sample=self._on_sample,
            on_reduced=self._on_reduced,
            on_failure=self._endings.fail,
        )
        self._filters = config.algorithm.filter_groups.enable
        self._putter = self._new_putter(config)
        last_chance = config.rollout.max_sample_losses - 1
        self._orphans = Orphans(self._groups, self._fleet, last_chance=last_chance)
        self._published = -1
        self._barrier = PauseBarrier(self._fleet, clock)
        self._lag_policy = config.async_training.lag_policy
        self._admission_show = AdmissionShow(self._outstanding, clock=clock, events=events)
        if resumption is not None:
            self._restore(resumption)

    def _new_validator(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        reward: BoundedReward,
        decoder: TextDecoder,
    ) -> Validator:
        return Validator(
            config,
            prompts=prompts,
            stop_token_ids=stop_token_ids,
            fleet=self._fleet,
            reward=reward,
            decoder=decoder,
            clock=self._clock,
            events=self._events,
            leave_result=self._queue.put_validate,
        )

    def _new_fleet(self, config: Config, replicas: Sequence[ReplicaControl]) -> Fleet:
        return Fleet(
            replicas,
            on_completions=self._on_completions,
            on_orphans=self._on_orphans,
            waits=self._waits,
            events=self._events,
            reply_seconds=config.rollout.exchange_timeout_seconds,
            return_seconds=config.rollout.replica_return_seconds,
        )

    def _new_putter(self, config: Config) -> Putter:
        return Putter(
            self._queue,
            stall_seconds=config.trainer.stall_timeout_seconds,
            waits=self._waits,
            before_put=self._outstanding.send,
            after_put=SampleShow(clock=self._clock, events=self._events).show,
        )

    async def fit(self) -> None:
        """Run until cancelled. The message queue learns when the last sample is in it, or why none will come."""
        try:
            # With the policy drop, a dropped sample is made again, however late.
            enough = None if self._lag_policy == "drop" else self._outstanding.undelivered
            putting, ending = self._putter.run(enough=enough), self._end_overdue_samples()
            await run_together(self._feed(), self._scorer.run(), putting, ending, self._fleet.run())
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
            await self._validator.start(version, global_steps, self._trainer_side if use_trainer_do_validate else None)
        self._published = version
        self._outstanding.take((await self._queue.get_statistics()).taken)
        self._outstanding.open_window(version)
        self._admission_show.show(in_flight=len(self._groups))
        self._may_admit.set()

    async def outstanding_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        """Samples on their way to the trainer that were admitted before this version (packed) was published."""
        before = self._outstanding.admitted_before(version, consumed)
        self._may_admit.set()
        return before

    async def version_captured(self, version: int, trained: int) -> None:
        """See `SampleSource`."""
        self._outstanding.capture(version, trained)

    async def samples_dropped(self, sample_ids: Sequence[str]) -> None:
        """The trainer dropped these samples; others are admitted in their place."""
        self._outstanding.drop(sample_ids)
        self._may_admit.set()

    def prompts_ready(self) -> None:
        """The source of prompts, which had none, has some."""
        self._may_admit.set()

    async def get_statistics(self) -> RolloutStatistics:
        """Samples by where they are; never waits for room in the queue."""
        self._outstanding.take((await self._queue.get_statistics()).taken)
        return self._outstanding.statistics(in_flight=len(self._groups))

    async def snapshot(self) -> bytes:
        """All that is on its way to the trainer at this moment; generation goes on."""
        self._outstanding.take((await self._queue.get_statistics()).taken)  # of a put that still waits for room, too
        groups = [*self._groups.all_open(), *self._scorer.unfinished]
        counts = self._outstanding.statistics(in_flight=len(self._groups))
        snapshot = RollouterSnapshot(
            life=self._life,
            admitted=counts.admitted,
            failed=counts.failed,
            dropped=counts.dropped,
            prompts=msgspec.msgpack.encode(self._prompts.state()),
            groups=[group.as_open() for group in groups],
            ready=[sample for sample in self._putter.ready if self._outstanding.holds(sample.sample_id)],
            admitted_under=self._outstanding.admitted_under,
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
        under = resumption.admitted_under() if self._lag_policy == "wait" else {}
        self._outstanding.restore(resumption.snapshot, under)
        ready, lost = resumption.ready()
        for sample in ready:
            self._putter.hand_over(sample)
        for sample in lost:
            self._endings.drop(sample.sample_id, "lost_lineage", response_lengths([sample]))
        for group in resumption.groups():
            if group.missing:
                self._orphans.add(self._groups.restore(group))
                self._deadlines.begin(group.sample_id)
            else:
                self._scorer.submit(group)

    # -- the loops -----------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            admitted = self._admit_all_that_fit()
            if admitted:
                self._events.emit(SampleAdmitted(ids=admitted))
                self._admission_show.show(in_flight=len(self._groups))
            if len(admitted) == AT_ONCE:
                await asyncio.sleep(0)  # everybody else gets a turn in a large window
                continue
            self._may_admit.clear()
            if self._outstanding.wanted <= 0:
                await self._may_admit.wait()  # nothing left to admit, unless a sample fails
                continue
            await self._waits.bounded(
                self._may_admit.wait(),
                seconds=self._stall_seconds,
                what=self._admission_wait(),
                culprit="data" if self._prompts.is_late else "trainer",
            )

    def _admit_all_that_fit(self) -> list[str]:
        self._orphans.send()
        admitted: list[str] = []
        in_flight_limit = self._in_flight_limit()
        while (
            self._outstanding.wanted > 0
            and len(admitted) < AT_ONCE
            and len(self._groups) < in_flight_limit
            and self._outstanding.admissible(self._published) > 0
            and (prompt := self._prompts.next_prompt()) is not None
        ):
            sample_id = self._outstanding.admit(self._published if self._lag_policy == "wait" else None)
            self._fleet.send(self._groups.open(sample_id, prompt))
            self._deadlines.begin(sample_id)
            admitted.append(sample_id)
        return admitted

    def _in_flight_limit(self) -> int:
        ready = len(self._fleet.feeds())
        return max(ready, int(IN_FLIGHT_OVER_PLACES * ready * self._rollout.max_num_seqs) // self._rollout.n)

    def _on_orphans(self, requests: Sequence[GenerationRequest]) -> None:
        self._validator.reassign([r for r in requests if r.request_id.startswith(PREFIX)])
        again = self._groups.reissue([r for r in requests if not r.request_id.startswith(PREFIX)])
        for sample_id, fresh in again.items():
            if self._groups.losses(sample_id) >= self._rollout.max_sample_losses:
                error = f"its replica was lost {self._rollout.max_sample_losses} times"
                if not self._goes_on(self._groups.give_up(sample_id), error):
                    self._endings.fail(sample_id, error)
            else:
                self._orphans.add(fresh)
        self._may_admit.set()

    async def _end_overdue_samples(self) -> None:
        while True:
            for sample_id in await self._deadlines.overdue():
                given_up = self._groups.give_up(sample_id)
                if given_up is not None and not self._goes_on(given_up, SAMPLE_TIMEOUT):
                    self._endings.drop(sample_id, SAMPLE_TIMEOUT, given_up.lengths)

    def _goes_on(self, given_up: GivenUp | None, reason: str) -> bool:
        """Whether the group goes on with what it has; nobody waits for the rest any more."""
        if given_up is None:
            return False
        self._fleet.abort(given_up.unwanted)
        if given_up.survivors is None:
            return False
        self._reduce(given_up.survivors, reason)
        return True

    def _reduce(self, group: Group, reason: str) -> None:
        self._on_reduced(group.sample_id, group.completions.count(None), reason)
        self._score(group)

    def _on_reduced(self, sample_id: str, lacking: int, reason: str) -> None:
        self._events.emit(GroupReduced(sample_id=sample_id, lacking=lacking, reason=reason))

    def _score(self, group: Group) -> None:
        self._deadlines.end(group.sample_id)
        self._scorer.submit(group)

    def _admission_wait(self) -> str:
        if not self._fleet.feeds():
            return "a replica that has confirmed a version"
        if self._prompts.is_late:
            return "the next prompt, which is being made"
        budget = self._outstanding.budget
        if self._outstanding.admissible(self._published) == 0:
            return f"a new version (staleness budget {budget.used} of {budget.allowed} samples used)"
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
            self._score(group)
        for group, error in taken.reduced:
            self._reduce(group, error)
        for sample_id, error in taken.refused.items():
            self._endings.fail(sample_id, error)
        for request in taken.again:
            self._orphans.add([request])
        if taken.zombies:
            self._events.emit(ZombiesRefused(replica=replica_id, completions=taken.zombies))
        self._may_admit.set()

    def _on_sample(self, sample: Sample) -> None:
        rewards = [response.reward for response in sample.responses]
        if self._filters and len(rewards) > 1 and max(rewards) == min(rewards):
            self._endings.drop(sample.sample_id, "zero_variance", response_lengths([sample]))
        else:
            self._putter.hand_over(sample)
