"""BoundedReward: any reward function with a place, a deadline and a checked answer; the one way to a score.

waits for: one of `reward.num_workers` places, then the function, at most `reward.timeout_seconds`; unblocked by: its
answer or the deadline, which cancels it. The time for a place does not count, nor that in which the reward is made
ready: a queue is no fault of who stands in it.
"""

from __future__ import annotations

import asyncio
import math

from paceline.core.errors import PacelineError, RewardError, RewardTimeout
from paceline.core.ports import PreparedReward, RewardFn
from paceline.core.sample import Prompt, Score
from paceline.core.sections.reward import RewardConfig


class BoundedReward:
    """Implements `core.ports.RewardFn` over another one."""

    def __init__(self, config: RewardConfig, reward: RewardFn) -> None:
        self._reward = reward
        self._ready = reward.ready if isinstance(reward, PreparedReward) else _at_once
        self._timeout_seconds = config.timeout_seconds
        self._places = asyncio.Semaphore(config.num_workers)

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """A finite score.

        Raises:
            RewardError: there is none (RewardTimeout: within the deadline); the line does not name the sample, so that
                reasons can be counted.
        """
        async with self._places:
            await self._ready()
            answer = await self._answer(prompt, response_text)
        value = answer.value if isinstance(answer, Score) else answer
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"reward: {value!r} is not a finite number")
        return answer if isinstance(answer, Score) else Score(float(value))

    async def _answer(self, prompt: Prompt, response_text: str) -> object:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._reward.score(prompt, response_text)
        except TimeoutError as error:
            raise RewardTimeout(f"reward: no answer within {self._timeout_seconds:g} s") from error
        except PacelineError:
            raise
        except Exception as error:  # a user's function may raise anything; it costs its own sample only
            raise RewardError(f"reward: {type(error).__name__}: {error}") from error


async def _at_once() -> None:
    """Of a reward that is always ready."""
