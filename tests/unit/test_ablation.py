"""The figures of `benchmarks/ablation.py` from a made event log, and its table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ablation import GOAL, SETTINGS, Run, fold, table
from tests.unit.config_keys.keys import config_with


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


EVENTS = [
    event(10.0, "sync.completed"),
    event(10.5, "validation.finished", accuracy=0.4),
    event(11.0, "sample.trained", lags={"0": 6, "1": 2}),
    event(11.0, "train.step", sequences=512, metrics={"rollout_corr/rollout_is_eff_sample_size": 1.0}),
    event(12.0, "sync.completed"),
    event(12.5, "validation.finished", accuracy=GOAL),
    event(14.0, "sample.trained", lags={"2": 8}),
    event(14.0, "train.step", sequences=512, metrics={"rollout_corr/rollout_is_eff_sample_size": 0.8}),
    event(15.0, "validation.finished", accuracy=0.9),
]


def test_figures_by_hand() -> None:
    run = fold("TIS 1", 3, EVENTS)
    assert (run.setting, run.seed, run.accuracy, run.seconds_to_goal) == ("TIS 1", 3, 0.9, 2.5)
    assert run.effective_sample_size == pytest.approx(0.9)
    assert run.lag == pytest.approx((2 * 1 + 8 * 2) / 16)
    assert run.responses_per_second == pytest.approx(1024 / 4)


def test_a_setting_that_misses_the_goal_says_so() -> None:
    reached = fold("a", 0, EVENTS)
    missed = Run("a", 1, 0.5, None, 0.5, 0.0, 100.0, [(1.0, 0.5)])
    row = table([reached, missed]).splitlines()[-1]
    assert row == "| a | 0.7000 (0.5000-0.9000) | 1 of 2 | 0.700 | 0.56 | 178 |"


def test_settings_are_configurations_of_their_own() -> None:
    configs = [config_with(dict(override.split("=") for override in keys)) for keys in SETTINGS.values()]
    assert len({config.model_dump_json() for config in configs}) == len(SETTINGS) == 10
