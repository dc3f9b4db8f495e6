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
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import PacelineError, RewardError
from paceline.core.events import AdmissionLevel, EventSink, SampleAdmitted, SampleFailed, SampleShown
from paceline.core.ports import Clock, PromptSource, QueueControl, ReplicaControl, RewardFn, TextDecoder
from paceline.core.sample import Completion, GenerationRequest, Response, Sample, SamplingParams, encode_sample
from paceline.core.tasks import run_together
from paceline.core.waits import Waits
from paceline.rollout.admission import AdmissionBudget
from paceline.rollout.fleet import Fleet
from paceline.rollout.groups import Group, Groups
from paceline.rollout.rollouter_state import RollouterState, save_state
from paceline.rollout.validation import PREFIX, Validator

SHOW_EVERY_SECONDS = 1.0
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
    ) -> None:
        self._life = life
        self._prompts = prompts
        self._queue = queue
        self._reward = reward
        self._decoder = decoder
        self._clock = clock
        self._events = events
        self._stall_seconds = config.trainer.stall_timeout_seconds
        self._total = config.total_steps * config.required_samples
        self._n = config.rollout.n
        self._places = config.rollout.max_num_seqs
        self._max_losses = config.rollout.max_sample_losses
        self._budget = AdmissionBudget(config.max_required_samples)
        self._waits = Waits(who="rollouter", clock=clock, events=events)
        self._fleet = Fleet(
            on_completions=self._on_completions,
            on_orphans=self._on_orphans,
            waits=self._waits,
            events=events,
            reply_seconds=config.rollout.exchange_timeout_seconds,
            return_seconds=config.rollout.replica_return_seconds,
        )
        for replica in replicas:
            self._fleet.add(replica)
        self._groups = Groups(responses=self._n, params=_training_params(config, stop_token_ids))
        self._validator = Validator(
            prompts=prompts.validation_prompts(),
            params=_validation_params(config, stop_token_ids),
            fleet=self._fleet,
            reward=reward,
            decoder=decoder,
            max_pinned=config.rollout.max_pinned_versions,
            deadline_seconds=self._stall_seconds,
            clock=clock,
            events=events,
        )
        self._whole: asyncio.Queue[Group] = asyncio.Queue()
        self._orphans: deque[list[GenerationRequest]] = deque()
        self._may_admit = asyncio.Event()
        self._admitted = 0
        self._failed = 0
        self._shown_at = float("-inf")
        self._level_at = float("-inf")

    async def fit(self) -> None:
        """Run until cancelled. The message queue learns when the last sample is in it, or why none will come."""
        try:
            await run_together(self._feed(), self._score_and_put(), self._fleet.run())
        except PacelineError as error:
            await self._queue.fail("rollouter", error.message)
            raise

    # -- what the synchronizer drives ----------------------------------------------------------------------------------

    def get_rollout_wg(self) -> Sequence[ReplicaControl]:
        """The replicas."""
        return self._fleet.replicas()

    async def pause(self) -> None:
        """No replica makes a decode step after this returns, until `resume`. Twice is harmless."""
        await asyncio.gather(*(replica.pause() for replica in self._fleet.replicas()))

    async def resume(self) -> None:
        """All replicas go on. Twice is harmless."""
        await asyncio.gather(*(replica.resume() for replica in self._fleet.replicas()))

    async def add_replica(self, replica: ReplicaControl) -> None:
        """A replica joins, or returns as a new process; it gets traffic once it has confirmed a version."""
        self._fleet.add(replica)

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
        statistics = await self._queue.get_statistics()
        self._budget.open_window(self._admitted - self._failed - statistics.taken)
        self._show_admission()
        self._may_admit.set()

    async def save_checkpoint(self, local_global_step_folder: str) -> None:
        """Write `rollouter.json` (where the prompts stand, samples admitted and failed) into this directory."""
        state = RollouterState(
            life=self._life, admitted=self._admitted, failed=self._failed, prompts=self._prompts.state()
        )
        save_state(state, Path(local_global_step_folder))

    async def wait_validations(self) -> None:
        """Return once no validation runs."""
        await self._validator.wait()

    # -- the loops -----------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        while True:
            admitted = self._admit_all_that_fit()
            if admitted:
                self._events.emit(SampleAdmitted(ids=admitted))
                self._show_admission()
            self._may_admit.clear()
            if self._admitted - self._failed >= self._total:
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
            self._admitted - self._failed < self._total
            and len(self._groups) < in_flight_limit
            and self._budget.free > 0
            and (prompt := self._prompts.next_prompt()) is not None
        ):
            self._budget.admit()
            self._admitted += 1
            sample_id = f"{self._life}-{self._admitted}"
            self._fleet.send(self._groups.open(sample_id, prompt))
            admitted.append(sample_id)
        return admitted

    def _in_flight_limit(self) -> int:
        ready = len(self._fleet.feeds())
        return max(ready, int(IN_FLIGHT_OVER_PLACES * ready * self._places) // self._n)

    def _send_again(self) -> None:
        while self._orphans and self._fleet.send(self._orphans[0]) is not None:
            self._orphans.popleft()

    def _on_orphans(self, requests: Sequence[GenerationRequest]) -> None:
        self._validator.reassign([r for r in requests if r.request_id.startswith(PREFIX)])
        again = self._groups.reissue([r for r in requests if not r.request_id.startswith(PREFIX)])
        for sample_id, fresh in again.items():
            if self._groups.losses(sample_id) >= self._max_losses:
                self._groups.close(sample_id)
                self._set_aside(sample_id, f"its replica was lost {self._max_losses} times")
            else:
                self._orphans.append(fresh)
        self._may_admit.set()

    def _set_aside(self, sample_id: str, error: str) -> None:
        self._failed += 1
        self._budget.give_back()
        self._may_admit.set()
        self._events.emit(SampleFailed(ids=[sample_id], error=error))

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
        for group in self._groups.take(training):
            self._whole.put_nowait(group)
            self._may_admit.set()

    async def _score_and_put(self) -> None:
        delivered = 0
        while True:
            batch = [await self._whole.get()]
            while not self._whole.empty():
                batch.append(self._whole.get_nowait())
            samples = [sample for group in batch if (sample := await self._score(group)) is not None]
            if samples:
                await self._queue.put_samples([encode_sample(sample) for sample in samples])
                delivered += len(samples)
                self._show(samples[-1])
            if delivered >= self._total:
                await self._queue.finish("rollouter")

    async def _score(self, group: Group) -> Sample | None:
        responses: list[Response] = []
        try:
            for completion in group.completions:
                if completion is None:  # a whole group has none missing
                    raise RewardError(f"sample {group.sample_id} lacks a response")
                text = self._decoder.decode(completion.token_ids)
                reward = await self._reward.score(group.prompt, text)
                responses.append(
                    Response(
                        token_ids=completion.token_ids,
                        logprobs=completion.logprobs,
                        versions=completion.versions,
                        finish_reason=completion.finish_reason,
                        text=text,
                        reward=reward,
                    )
                )
        except RewardError as error:
            self._set_aside(group.sample_id, error.message)
            return None
        return Sample(sample_id=group.sample_id, life=self._life, prompt=group.prompt, responses=responses)

    # -- what people see -----------------------------------------------------------------------------------------------

    def _show(self, sample: Sample) -> None:
        if self._clock.now() - self._shown_at < SHOW_EVERY_SECONDS:
            return
        self._shown_at = self._clock.now()
        response = sample.responses[0]
        self._events.emit(
            SampleShown(
                prompt=sample.prompt.text,
                response=response.text,
                reward=response.reward,
                version=response.versions[-1] if response.versions else 0,
            )
        )

    def _show_admission(self) -> None:
        if self._clock.now() - self._level_at < SHOW_EVERY_SECONDS:
            return
        self._level_at = self._clock.now()
        self._events.emit(
            AdmissionLevel(used=self._budget.used, allowed=self._budget.allowed, in_flight=len(self._groups))
        )


def _training_params(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stop_token_ids,
    )


def _validation_params(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stop_token_ids,
    )
