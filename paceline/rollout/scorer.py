"""Scorer: whole groups in, scored samples out; a bad reward affects its own sample alone.

consumes: groups whose responses have all come back; produces: samples, or a named failure; waits for: the reward
function; unblocked by: its answer or its deadline (`BoundedReward`). Groups are scored beside each other. The first
response of a group goes ahead, the others follow together: a row that no function can score costs one deadline, not one
for each of its responses. With the policy `survivors` the next one goes ahead when the first has no score, and a row
whose first two run into the deadline is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from paceline.core.errors import RewardError, RewardTimeout
from paceline.core.ports import TextDecoder
from paceline.core.sample import Completion, Response, Sample
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.groups import LEAST_SURVIVORS, Group

MOST_TIMEOUTS_AHEAD = 2
MOST_FAILED_IN_A_ROW = 1000

Outcome = Response | RewardError


class Scorer:
    """Scores groups. `on_sample` gets each sample, `on_failure` the sample id and why there is none. When a response
    has no score, `policy` ends its group (`retry`) or lets at least two survivors go on (`survivors`); `on_reduced`
    gets the id of such a sample, how many have no score and why the first of them has none.
    """

    def __init__(
        self,
        *,
        life: int,
        reward: BoundedReward,
        decoder: TextDecoder,
        policy: Literal["retry", "survivors"],
        on_sample: Callable[[Sample], None],
        on_reduced: Callable[[str, int, str], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        self._life = life
        self._reward = reward
        self._decoder = decoder
        self._policy = policy
        self._on_sample = on_sample
        self._on_reduced = on_reduced
        self._on_failure = on_failure
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._scoring: dict[str, Group] = {}
        self._failed_in_a_row = 0
        self._last_error = ""

    def submit(self, group: Group) -> None:
        """Score this group as soon as there is room."""
        self._scoring[group.sample_id] = group
        self._groups.put_nowait(group)

    @property
    def unfinished(self) -> list[Group]:
        """Groups that are neither sample nor failure yet."""
        return list(self._scoring.values())

    async def run(self) -> None:
        """Score for ever; ends by cancellation, which cancels what is being scored.

        Raises:
            RewardError: it looks as if no sample would ever have a reward.
        """
        tasks: set[asyncio.Task[None]] = set()
        try:
            while self._failed_in_a_row < MOST_FAILED_IN_A_ROW:
                task = asyncio.ensure_future(self._score(await self._groups.get()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            raise RewardError(
                f"{self._failed_in_a_row} samples in a row have no reward, the last one: {self._last_error}"
            )
        finally:
            for task in tasks:
                task.cancel()

    async def _score(self, group: Group) -> None:
        try:
            outcomes = await self._respond_to_all(group)
        except RewardError as error:
            self._failed_in_a_row += 1
            self._last_error = error.message
            self._on_failure(group.sample_id, error.message)
        else:
            self._failed_in_a_row = 0
            errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
            if errors:
                self._on_reduced(group.sample_id, len(errors), errors[0].message)
            # What a row has for its reward has done its work: it need not travel on.
            prompt = msgspec.structs.replace(group.prompt, extra_info={})
            responses = [outcome for outcome in outcomes if isinstance(outcome, Response)]
            self._on_sample(Sample(group.sample_id, self._life, prompt, responses))
        finally:
            self._scoring.pop(group.sample_id, None)

    async def _respond_to_all(self, group: Group) -> list[Outcome]:
        """Of each response that was made.

        Raises:
            RewardError: the group has too few of them.
        """
        made = [completion for completion in group.completions if completion is not None]
        outcomes: list[Outcome] = []
        while not any(isinstance(outcome, Response) for outcome in outcomes):
            outcomes.append(await self._respond(group, made[len(outcomes)]))
            _refuse_hopeless(outcomes, len(made))
        calls = [asyncio.ensure_future(self._respond(group, completion)) for completion in made[len(outcomes) :]]
        try:
            outcomes.extend(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
        _refuse_hopeless(outcomes, len(made))
        return outcomes

    async def _respond(self, group: Group, completion: Completion) -> Outcome:
        text = self._decoder.decode(completion.token_ids)
        try:
            score = await self._reward.score(group.prompt, text)
        except RewardError as error:
            if self._policy == "retry":
                raise
            return error
        return Response(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            reward=score.value,
            reward_metrics=score.metrics,
        )


def _refuse_hopeless(outcomes: Sequence[Outcome], made: int) -> None:
    """Raise the first error when too few can survive, or when it looks as if all would run into the deadline."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    only_timeouts = len(errors) == len(outcomes) and all(isinstance(error, RewardTimeout) for error in errors)
    if errors and (made - len(errors) < LEAST_SURVIVORS or (only_timeouts and len(errors) >= MOST_TIMEOUTS_AHEAD)):
        raise errors[0]
