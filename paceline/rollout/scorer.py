"""Scorer: whole groups in, scored samples out; a bad reward affects its own sample alone.

consumes: groups whose responses have all come back; produces: samples, or a named failure; waits for: the reward
function, at most `timeout_seconds` per response; unblocked by: its answer or the deadline. Groups are scored beside
each other, at most `at_once` of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from paceline.core.errors import PacelineError, RewardError
from paceline.core.ports import RewardFn, TextDecoder
from paceline.core.sample import Completion, Prompt, Response, Sample
from paceline.core.sections.reward import RewardConfig
from paceline.rollout.groups import Group


class Scorer:
    """Scores groups; `on_sample` gets each sample, `on_failure` the sample id and why there is none."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        life: int,
        reward: RewardFn,
        decoder: TextDecoder,
        on_sample: Callable[[Sample], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        self._life = life
        self._reward = reward
        self._decoder = decoder
        self._timeout_seconds = config.timeout_seconds
        self._places = asyncio.Semaphore(config.num_workers)
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
                group = await self._groups.get()
                await self._places.acquire()
                task = asyncio.ensure_future(self._score(group))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _score(self, group: Group) -> None:
        try:
            responses = [await self._respond(group, completion) for completion in group.completions]
        except RewardError as error:
            self._on_failure(group.sample_id, error.message)
        else:
            self._on_sample(Sample(group.sample_id, self._life, group.prompt, responses))
        finally:
            self._scoring.pop(group.sample_id, None)
            self._places.release()

    async def _respond(self, group: Group, completion: Completion | None) -> Response:
        if completion is None:  # a whole group has none missing
            raise RewardError(f"sample {group.sample_id} lacks a response")
        text = self._decoder.decode(completion.token_ids)
        return Response(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            reward=await self._bounded_reward(group.prompt, text),
        )

    async def _bounded_reward(self, prompt: Prompt, text: str) -> float:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                reward: object = await self._reward.score(prompt, text)
        except TimeoutError as error:
            raise RewardError(f"reward: no answer within {self._timeout_seconds:g} s") from error
        except PacelineError:
            raise
        except Exception as error:  # a user's function may raise anything; it costs its own sample only
            raise RewardError(f"reward: {type(error).__name__}: {error}") from error
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RewardError(f"reward: {reward!r} is not a finite number")
        return float(reward)
