"""Scorer: whole groups in, scored samples out; a bad reward affects its own sample alone.

consumes: groups whose responses have all come back; produces: samples, or a named failure; waits for: the reward
function; unblocked by: its answer or its deadline (`BoundedReward`). Groups are scored beside each other. The first
response of a group goes ahead, the others follow together: a row that no function can score costs one deadline, not one
for each of its responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from paceline.core.errors import RewardError
from paceline.core.ports import TextDecoder
from paceline.core.sample import Completion, Response, Sample
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.groups import Group


class Scorer:
    """Scores groups; `on_sample` gets each sample, `on_failure` the sample id and why there is none."""

    def __init__(
        self,
        *,
        life: int,
        reward: BoundedReward,
        decoder: TextDecoder,
        on_sample: Callable[[Sample], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        self._life = life
        self._reward = reward
        self._decoder = decoder
        self._on_sample = on_sample
        self._on_failure = on_failure
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._scoring: dict[str, Group] = {}

    def submit(self, group: Group) -> None:
        """Score this group as soon as there is room."""
        self._scoring[group.sample_id] = group
        self._groups.put_nowait(group)

    @property
    def unfinished(self) -> list[Group]:
        """Groups that are neither sample nor failure yet."""
        return list(self._scoring.values())

    async def run(self) -> None:
        """Score for ever; ends by cancellation, which cancels what is being scored."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.ensure_future(self._score(await self._groups.get()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _score(self, group: Group) -> None:
        try:
            responses = await self._respond_to_all(group)
        except RewardError as error:
            self._on_failure(group.sample_id, error.message)
        else:
            # What a row has for its reward has done its work: it need not travel on.
            prompt = msgspec.structs.replace(group.prompt, extra_info={})
            self._on_sample(Sample(group.sample_id, self._life, prompt, responses))
        finally:
            self._scoring.pop(group.sample_id, None)

    async def _respond_to_all(self, group: Group) -> list[Response]:
        first, *others = [completion for completion in group.completions if completion is not None]
        responses = [await self._respond(group, first)]
        calls = [asyncio.ensure_future(self._respond(group, completion)) for completion in others]
        try:
            responses.extend(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()
        return responses

    async def _respond(self, group: Group, completion: Completion) -> Response:
        text = self._decoder.decode(completion.token_ids)
        score = await self._reward.score(group.prompt, text)
        return Response(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            reward=score.value,
            reward_metrics=score.metrics,
        )
