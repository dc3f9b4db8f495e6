"""Keys of the rewards, on real processes; and how validations draw."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.core.config import Config
from paceline.core.errors import ConfigError, RewardError
from paceline.core.sample import Prompt, SamplingParams, Score
from paceline.reward.process_reward import ProcessReward
from paceline.runtime import task_parts
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.config_keys.marker_run import run_marked

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"
PROMPT = Prompt("p", "?", (1,), "\\frac{1}{2}", "t")


def score_of(config: Config, log: Path, response: str) -> Score | float:
    async def main() -> Score | float:
        reward = await task_parts.build_reward(config, log)
        try:
            return await reward.score(PROMPT, response)
        finally:
            if isinstance(reward, ProcessReward):
                await reward.close()

    return asyncio.run(main())


def with_function(directory: Path, text: str, **settings: object) -> Config:
    path = directory / "mine.py"
    path.write_text(text, encoding="utf-8")
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return config_with({"reward.custom_reward_function.path": str(path), **keys})


@shows("reward.name")
def test_a_scorer_is_chosen_by_name(tmp_path: Path) -> None:
    assert score_of(config_with({"reward.name": "math_verify"}), tmp_path / "log", "0.5") == Score(1.0)
    assert score_of(config_with({"reward.name": "arithmetic"}), tmp_path / "log", "0.5") == 0.0
    assert score_of(config_with({}), tmp_path / "log", "\\frac{1}{2}") == 1.0


@shows("reward.custom_reward_function.path", "reward.custom_reward_function.name", "reward.reward_kwargs")
def test_a_function_of_the_users_own_is_called_with_its_arguments(tmp_path: Path) -> None:
    text = f"def compute_score({SIGNATURE}, scale=1): return scale\ndef other({SIGNATURE}): return 7"
    assert score_of(with_function(tmp_path, text), tmp_path / "log", "") == Score(1.0)
    scaled = with_function(tmp_path, text, reward__reward_kwargs={"scale": 5})
    assert score_of(scaled, tmp_path / "log", "") == Score(5.0)
    other = with_function(tmp_path, text, reward__custom_reward_function__name="other")
    assert score_of(other, tmp_path / "log", "") == Score(7.0)


@shows("reward.retry_attempts", "reward.retry_wait_seconds")
def test_a_network_error_is_tried_again_so_often_after_such_waits(tmp_path: Path) -> None:
    text = (
        "import time\ncalls = []\n"
        f"def compute_score({SIGNATURE}):\n"
        "    calls.append(time.monotonic())\n"
        "    if len(calls) < 3: raise ConnectionError('no judge')\n"
        "    return {'score': 1, 'first': calls[1] - calls[0], 'second': calls[2] - calls[1]}"
    )
    made = score_of(with_function(tmp_path, text, reward__retry_wait_seconds=0.1), tmp_path / "log", "")
    assert isinstance(made, Score)
    assert made.metrics["first"] >= 0.1
    assert made.metrics["second"] >= 0.2
    with pytest.raises(RewardError, match="ConnectionError: no judge"):
        score_of(with_function(tmp_path, text, reward__retry_attempts=2), tmp_path / "log", "")


@shows("rollout.val_kwargs.n")
def test_so_many_responses_per_validation_prompt() -> None:
    def validated(n: int) -> int:
        draw = {"rollout.val_kwargs.do_sample": True, "rollout.val_kwargs.temperature": 1.0}
        run = run_marked({**draw, "rollout.val_kwargs.n": n, "trainer.test_freq": 0, "rollout.total_rollout_steps": 4})
        return sum(request.pinned_version is not None for request in run.requests)

    assert validated(3) == 3 * validated(1)
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs: n=2 greedy responses are all the same"):
        config_with({"rollout.val_kwargs.n": 2})


@shows(
    "rollout.val_kwargs.do_sample",
    "rollout.val_kwargs.temperature",
    "rollout.val_kwargs.top_p",
    "rollout.val_kwargs.top_k",
)
def test_validations_draw_as_they_are_told() -> None:
    def params(**settings: object) -> SamplingParams:
        keys = {f"rollout.val_kwargs.{key}": value for key, value in settings.items()}
        run = run_marked({**keys, "trainer.test_freq": 0, "rollout.total_rollout_steps": 4})
        return next(request.params for request in run.requests if request.pinned_version is not None)

    chosen = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    drawing, greedy = params(do_sample=True, **chosen), params(**chosen)
    assert (drawing.temperature, drawing.top_p, drawing.top_k) == (0.7, 0.9, 5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs: do_sample=true needs a temperature above 0"):
        config_with({"rollout.val_kwargs.do_sample": True})
