"""`paceline check-reward FILE --data FILE`: what a reward function does with real rows, before a run depends on it.

Each row is scored twice, with its own ground truth as the response and with an empty one, in processes and under a
deadline as in a run. A row without a score, or ground truths that score no better than nothing, is what to look at.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from paceline.core.config import Config, build_config
from paceline.core.errors import ConfigError, PromptError, RewardError
from paceline.core.permutation import SeededPermutation
from paceline.core.sample import Prompt, Score
from paceline.dataset.opening import open_training
from paceline.dataset.prompt_rows import PromptRows
from paceline.reward.process_reward import ProcessReward
from paceline.rollout.bounded_reward import BoundedReward
from paceline.runtime.task_parts import BUILT_IN, build_reward

SEED = "check-reward"
AT_ONCE = 4


class Tried(NamedTuple):
    """One row: what its ground truth and nothing score, the seconds of the slower call, or why there is no score."""

    name: str
    truth: Score
    empty: Score
    seconds: float
    error: str


class NoTokens:
    """Rows are asked for what they say, never for their tokens."""

    def render(self, prompt: object) -> tuple[str, list[int]]:
        """Nothing."""
        return "", []


def check_reward(
    function: str, data: Sequence[str], *, rows: int, name: str, kwargs: str, timeout: float, prompt_key: str
) -> int:
    """Print what was found; 0 when every row has a score, 1 when one has not.

    Raises:
        ConfigError: the function or the data cannot be used.
    """
    config = _config(function, data, name, kwargs, timeout, prompt_key)
    opened = PromptRows(
        open_training(config.data, chat=True, spill_dir=None),
        renderer=NoTokens(),
        prompt_key=prompt_key,
        longest=1,
        truncation="filter",
    )
    order = SeededPermutation(len(opened), SEED)
    places = sorted(order[place] for place in range(min(rows, len(order))))
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "reward.log"
        tried, reward = asyncio.run(_try_all(config, opened, places, log))
        printed = log.stat().st_size if log.exists() else 0
        _show(function, name, tried, len(opened), reward, printed)
    return 1 if any(one.error for one in tried) else 0


def _config(function: str, data: Sequence[str], name: str, kwargs: str, timeout: float, prompt_key: str) -> Config:
    try:
        arguments = json.loads(kwargs)
    except ValueError as error:
        raise ConfigError(f"--kwargs: is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError("--kwargs: has to be a JSON object")
    reward: dict[str, Any] = {"timeout_seconds": timeout, "num_workers": AT_ONCE, "reward_kwargs": arguments}
    if function in BUILT_IN:
        reward["name"] = function
    else:
        reward["custom_reward_function"] = {"path": str(Path(function).absolute()), "name": name}
    return build_config({"reward": reward, "data": {"train_files": list(data), "prompt_key": prompt_key}})


async def _try_all(
    config: Config, rows: PromptRows, places: Sequence[int], log: Path
) -> tuple[list[Tried], ProcessReward]:
    reward = await build_reward(config, log)
    assert isinstance(reward, ProcessReward)
    bounded = BoundedReward(config.reward, reward)
    free = asyncio.Semaphore(AT_ONCE if reward.is_async else 1)  # a def function is timed alone

    async def one(place: int) -> Tried:
        async with free:
            await reward.ready()
            return await _try(bounded, rows, place)

    try:
        return list(await asyncio.gather(*map(one, places))), reward
    finally:
        await reward.close()


async def _try(reward: BoundedReward, rows: PromptRows, place: int) -> Tried:
    name, nothing, seconds = rows.name(place), Score(0.0), 0.0
    try:
        row = rows.task_row(place)
        prompt = Prompt(name, "", (), row.ground_truth, row.data_source, row.extra_info)
        truth = row.ground_truth if isinstance(row.ground_truth, str) else json.dumps(row.ground_truth, default=str)
        scores: list[Score] = []
        for response in (truth, ""):
            score, took = await _timed(reward, prompt, response)
            scores.append(score)
            seconds = max(seconds, took)
    except (PromptError, RewardError) as error:
        return Tried(name, nothing, nothing, seconds, error.message.removeprefix(f"{name}: ").removeprefix("reward: "))
    return Tried(name, scores[0], scores[1], seconds, "")


async def _timed(reward: BoundedReward, prompt: Prompt, response: str) -> tuple[Score, float]:
    began = time.monotonic()
    score = await reward.score(prompt, response)
    return score, time.monotonic() - began


def _show(function: str, name: str, tried: Sequence[Tried], total: int, reward: ProcessReward, printed: int) -> None:
    kind = "async def" if reward.is_async else "def"
    what = function if function in BUILT_IN else f"{function}: {kind} {name}"
    print(f"{what}, {len(tried)} of {total} rows")
    scored = [one for one in tried if not one.error]
    if scored:
        truths, empty = [one.truth.value for one in scored], [one.empty.value for one in scored]
        slowest = max(scored, key=lambda one: one.seconds)
        print(f"ground truths score   mean {mean(truths):.3f}, from {min(truths):g} to {max(truths):g}")
        print(f"empty responses score mean {mean(empty):.3f}, from {min(empty):g} to {max(empty):g}")
        seconds = f"median {median(one.seconds for one in scored):.4f}, slowest {slowest.seconds:.4f} ({slowest.name})"
        print(f"seconds per response  {seconds}")
        metrics = sorted({name for one in scored for name in one.truth.metrics})
        print(f"metrics               {', '.join(metrics) or 'none'}")
        if mean(truths) <= mean(empty):
            print("look: ground truths score no better than empty responses; does it expect another form of answer?")
    if printed:
        print(f"it prints: {printed} bytes here; a run keeps them in reward.log")
    if reward.most_children:
        print(f"it leaves processes behind: {reward.most_children} of one process; they end with it")
    failed = [one for one in tried if one.error]
    print(f"{len(failed)} of {len(tried)} rows have no score")
    for one in failed:
        print(f"  {one.name}: {one.error}")
