"""FullyAsyncRollouter: turns prompts into scored samples, ahead of the trainer by no more than the staleness budget.

consumes: prompts, completions; produces: samples in the message queue; waits for: admission budget, replicas, room in
the queue; unblocked by: `update_param_version` (a new window), the trainer's takes, completions.

Law: every admitted sample ends exactly once (L1): it reaches the queue, or fails with its error. No prompt is admitted
before the first published version (V5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import PacelineError, RewardError
from paceline.core.events import AdmissionLevel, EventSink, SampleAdmitted, SampleFailed, SampleShown
from paceline.core.ports import Clock, PromptSource, QueueControl, ReplicaControl, RewardFn, TextDecoder
from paceline.core.sample import Completion, Response, Sample, SamplingParams, encode_sample
from paceline.core.tasks import run_together
from paceline.core.waits import Waits
from paceline.rollout.admission import AdmissionBudget
from paceline.rollout.groups import Group, Groups
from paceline.rollout.load_balancer import LoadBalancer
from paceline.rollout.replica_feed import ReplicaFeed
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
        places = len(replicas) * config.rollout.max_num_seqs
        self._in_flight_limit = max(len(replicas), int(IN_FLIGHT_OVER_PLACES * places) // self._n)
        self._budget = AdmissionBudget(config.max_required_samples)
        self._balancer = LoadBalancer(replica.replica_id for replica in replicas)
        self._waits = Waits(who="rollouter", clock=clock, events=events)
        self._feeds = {
            replica.replica_id: ReplicaFeed(
                replica=replica,
                on_completions=self._on_completions,
                waits=self._waits,
                reply_seconds=self._stall_seconds,
            )
            for replica in replicas
        }
        self._groups = Groups(responses=self._n, params=_training_params(config, stop_token_ids))
        self._validator = Validator(
            prompts=prompts.validation_prompts(),
            params=_validation_params(config, stop_token_ids),
            feeds=list(self._feeds.values()),
            reward=reward,
            decoder=decoder,
            max_pinned=config.rollout.max_pinned_versions,
            deadline_seconds=self._stall_seconds,
            clock=clock,
            events=events,
        )
        self._whole: asyncio.Queue[Group] = asyncio.Queue()
        self._may_admit = asyncio.Event()
        self._admitted = 0
        self._failed = 0
        self._shown_at = float("-inf")
        self._level_at = float("-inf")

    async def fit(self) -> None:
        """Run until cancelled. The message queue learns when the last sample is in it, or why none will come."""
        try:
            await run_together(self._feed(), self._score_and_put(), *(feed.run() for feed in self._feeds.values()))
        except PacelineError as error:
            await self._queue.fail("rollouter", error.message)
            raise

    # -- what the synchronizer drives ----------------------------------------------------------------------------------

    def get_rollout_wg(self) -> Sequence[ReplicaControl]:
        """The replicas."""
        return [feed.replica for feed in self._feeds.values()]

    async def pause(self) -> None:
        """No replica makes a decode step after this returns, until `resume`. Twice is harmless."""
        await asyncio.gather(*(feed.replica.pause() for feed in self._feeds.values()))

    async def resume(self) -> None:
        """All replicas go on. Twice is harmless."""
        await asyncio.gather(*(feed.replica.resume() for feed in self._feeds.values()))

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None:
        """A version is published: open its admission window, and pin it for a validation if one is asked for."""
        if validate:
            await self._validator.start(version, global_steps)
        statistics = await self._queue.get_statistics()
        self._budget.open_window(self._admitted - self._failed - statistics.taken)
        for replica_id in self._feeds:
            self._balancer.open(replica_id)
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
        admitted: list[str] = []
        while (
            self._admitted - self._failed < self._total
            and len(self._groups) < self._in_flight_limit
            and self._budget.free > 0
        ):
            replica_id = self._balancer.choose(self._n)
            prompt = self._prompts.next_prompt() if replica_id is not None else None
            if replica_id is None or prompt is None:
                break
            self._budget.admit()
            self._admitted += 1
            sample_id = f"{self._life}-{self._admitted}"
            self._feeds[replica_id].send(self._groups.open(sample_id, prompt))
            admitted.append(sample_id)
        return admitted

    def _admission_wait(self) -> str:
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
        self._balancer.done(replica_id, len(training))
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
            self._failed += 1
            self._budget.give_back()
            self._may_admit.set()
            self._events.emit(SampleFailed(ids=[group.sample_id], error=error.message))
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
