"""Reward of the embedded arithmetic task: exact match with the answer.

Law: whatever goes wrong in scoring one response is a RewardError of that response, never the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.core.errors import RewardError
from paceline.core.sample import Prompt
from paceline.task.arithmetic import score


class ArithmeticReward:
    """Implements `core.ports.RewardFn`; `scorer` maps (response text, ground truth) to a finite number."""

    def __init__(self, scorer: Callable[[str, str], float] = score) -> None:
        self._scorer = scorer

    async def score(self, prompt: Prompt, response_text: str) -> float:
        """1.0 for the right answer, else 0.0.

        Raises:
            RewardError: the scorer failed, or gave something that is not a finite number.
        """
        try:
            reward = float(self._scorer(response_text, prompt.ground_truth))
        except Exception as error:  # a scorer may fail in any way; its response fails, not the run
            raise RewardError(f"reward of prompt {prompt.prompt_id} failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(reward):
            raise RewardError(f"reward of prompt {prompt.prompt_id} is {reward}, not a finite number")
        return reward
