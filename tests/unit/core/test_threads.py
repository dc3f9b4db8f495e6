"""The thread plan never promises more threads than there are cores, but one each."""

from __future__ import annotations

import pytest

from paceline.core.threads import plan_threads


def test_the_trainers_side_of_validations_takes_a_thread_of_the_trainers() -> None:
    assert plan_threads(16, 2, ["validator"]) == {**plan_threads(16, 2), "trainer": 7, "validator": 1}
    assert plan_threads(2, 2, ["validator"]) == {**plan_threads(2, 2), "trainer": 1, "validator": 1}


@pytest.mark.parametrize(
    ("cores", "replicas", "trainer", "each"), [(2, 2, 1, 1), (1, 2, 1, 1), (4, 2, 2, 1), (16, 2, 8, 4), (16, 3, 10, 2)]
)
def test_plan(cores: int, replicas: int, trainer: int, each: int) -> None:
    plan = plan_threads(cores, replicas)
    assert plan["trainer"] == trainer
    assert [plan[f"replica-{i}"] for i in range(replicas)] == [each] * replicas
    assert sum(plan.values()) <= max(cores, replicas + 1)
    assert plan["message_queue"] == plan["synchronizer"] == plan["rollouter"] == 0
