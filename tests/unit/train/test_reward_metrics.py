"""Metrics of reward functions over the responses of an update."""

from __future__ import annotations

from paceline.core.sample import Response
from paceline.train.reward_metrics import reward_metrics


def response(**metrics: float) -> Response:
    return Response([1], [0.0], [0], "stop", "", 1.0, metrics)


def test_each_is_averaged_over_those_that_have_it() -> None:
    found = reward_metrics([response(length=2.0, format=1.0), response(length=4.0), response()])
    assert found == {"reward/format/mean": 1.0, "reward/length/mean": 3.0}
    assert reward_metrics([response()]) == {}
