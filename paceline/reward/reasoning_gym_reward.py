"""Reward `reasoning_gym`: the score that a reasoning-gym data set gives an answer to one of its problems.

The answer is what stands between the last <answer> tags, else the whole response. The problem is made again from what
its row says of it, so nothing but numbers and names has travelled.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

DATASETS_KEPT = 64
PROBLEMS_KEPT = 1024


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Between 0.0 and 1.0, as the data set has it.

    Raises:
        KeyError: the row is not one of a reasoning-gym data set.
    """
    name, parameters = extra_info["dataset"], json.dumps(extra_info["parameters"], sort_keys=True)
    entry = _problem(name, parameters, extra_info["index"])
    answer = extract_answer(solution_str)
    return float(_dataset(name, parameters).score_answer(solution_str.strip() if answer is None else answer, entry))


@lru_cache(DATASETS_KEPT)
def _dataset(name: str, parameters: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(parameters))


@lru_cache(PROBLEMS_KEPT)
def _problem(name: str, parameters: str, index: int) -> Any:
    return _dataset(name, parameters)[index]
