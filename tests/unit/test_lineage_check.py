"""The independent check of killed runs finds what it is for; the Kolmogorov-Smirnov test tells distributions apart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lineage_check import check, kolmogorov_smirnov

Event = dict[str, Any]
LIFE_1: list[Event] = [
    {"kind": "run.started", "life": 1},
    {"kind": "sample.admitted", "ids": ["1-1", "1-2", "1-3", "1-4"]},
    {"kind": "sample.trained", "ids": ["1-1"], "step": 1},
    {"kind": "train.step", "step": 1},
    {"kind": "sample.trained", "ids": ["1-2"], "step": 2},
    {"kind": "train.step", "step": 2},
]
LIFE_2: list[Event] = [
    {"kind": "run.started", "life": 2},
    {
        "kind": "run.resumed",
        "from_life": 1,
        "step": 1,
        "version": (1 << 40) + 1,
        "admitted": 3,
        "restored": ["1-2", "1-3"],
    },
    {"kind": "sample.admitted", "ids": ["2-4"]},
    {"kind": "sample.trained", "ids": ["1-3"], "step": 2},
    {"kind": "train.step", "step": 2},
    {"kind": "sample.trained", "ids": ["1-2", "2-4"], "step": 3},
    {"kind": "train.step", "step": 3},
    {"kind": "run.finished", "outcome": "completed"},
]


def rollout(sample_id: str, life: int, *versions: str) -> Event:
    number = sample_id.partition("-")[2]
    response = {"token_ids": [1] * len(versions), "versions": [[version, 1] for version in versions]}
    return {
        "sample_id": sample_id,
        "life": life,
        "fate": "trained",
        "prompt_id": f"0:p{number}",
        "responses": [response],
    }


ROLLOUTS = [
    rollout("1-1", 1, "1.0"),
    rollout("1-2", 1, "1.0"),
    rollout("1-2", 2, "1.0", "1.1", "2.1"),
    rollout("1-3", 2, "1.1", "2.1"),
    rollout("2-4", 2, "2.2"),
]


def problems(directory: Path, events: list[Event], rollouts: list[Event]) -> list[str]:
    (directory / "rollouts").mkdir()
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in rollouts)
    (directory / "rollouts" / "0.jsonl").write_text(lines + '{"half', encoding="utf-8")
    return check(directory).problems


def test_a_right_run_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, LIFE_1 + LIFE_2, ROLLOUTS) == []
    findings = check(tmp_path)
    assert (findings.trained, findings.lost_samples, findings.lost_updates) == (4, 1, 1)


def replaced(events: list[Event], old: Event, new: Event) -> list[Event]:
    assert old in events
    return [new if event == old else event for event in events]


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda e: replaced(e, LIFE_2[3], {**LIFE_2[3], "ids": ["1-3", "1-1"]}), "sample 1-1 ended 2 times"),
        (lambda e: replaced(e, LIFE_2[5], {**LIFE_2[5], "ids": ["2-4"]}), "samples that never ended: [2]"),
        (lambda e: replaced(e, LIFE_2[4], LIFE_2[6]), "update 3 is there 2 times"),
        (lambda e: replaced(e, LIFE_2[2], {**LIFE_2[2], "ids": ["2-5"]}), "admitted numbers are missing: [4]"),
    ],
)
def test_a_wrong_run_is_found(tmp_path: Path, break_it: Callable[[list[Event]], list[Event]], said: str) -> None:
    assert said in problems(tmp_path, break_it(LIFE_1 + LIFE_2), ROLLOUTS)


def test_wrong_rollouts_are_found(tmp_path: Path) -> None:
    lost = [*ROLLOUTS[:3], rollout("1-3", 2, "1.2", "2.1"), *ROLLOUTS[4:]]
    (tmp_path / "a").mkdir()
    assert problems(tmp_path / "a", LIFE_1 + LIFE_2, lost) == ["1-3 holds a token of the lost version 1.2"]
    twice = [*ROLLOUTS[:4], {**ROLLOUTS[4], "prompt_id": "0:p1"}]
    (tmp_path / "b").mkdir()
    assert problems(tmp_path / "b", LIFE_1 + LIFE_2, twice) == ["prompt 0:p1 was trained 2 times"]
    (tmp_path / "c").mkdir()
    assert problems(tmp_path / "c", LIFE_1 + LIFE_2, ROLLOUTS[:4]) == ["1 trained samples are not in rollouts/"]


def test_kolmogorov_smirnov() -> None:
    assert kolmogorov_smirnov([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    assert kolmogorov_smirnov([1.0] * 50, [2.0] * 50)[0] == 1.0
    assert kolmogorov_smirnov([1.0] * 50, [2.0] * 50)[1] < 1e-9
    # 0.25 between two samples of 100: scaled (7.0711 + 0.12 + 0.0156) 0.25 = 1.8017, tail 2 e^-6.492 = 0.00303.
    statistic, p_value = kolmogorov_smirnov(range(100), range(25, 125))
    assert statistic == pytest.approx(0.25)
    assert p_value == pytest.approx(0.00303, rel=0.01)
    draw = random.Random(5)
    same = [
        kolmogorov_smirnov([draw.gauss(0, 1) for _ in range(80)], [draw.gauss(0, 1) for _ in range(120)])[1]
        for _ in range(200)
    ]
    assert sum(p < 0.05 for p in same) <= 20
