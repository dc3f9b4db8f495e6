"""Loading a user's function, and making a score of whatever it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError, RewardError
from paceline.core.sample import Score
from paceline.reward.compute_score import RewardFunction, as_score, is_network_error, one_line
from paceline.reward.function_spec import Call
from tests.unit.reward.functions import spec_of, write

CALL = Call(1, "sums", "42", "42", {"index": 7})
SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (0.25, Score(0.25)),
        (np.float32(0.5), Score(0.5)),
        (torch.tensor(0.5), Score(0.5)),
        ({"score": 2}, Score(2.0)),
        ({"score": 1, "acc": True, "why": "text", "spread": float("nan"), "parts": [1]}, Score(1.0, {"acc": 1.0})),
    ],
)
def test_numbers_and_dicts_are_scores(answer: object, score: Score) -> None:
    assert as_score(answer) == score


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (None, "returned None, not a number"),
        ("1", "returned str, not a number"),
        ([1], "returned list, not a number"),
        (float("inf"), "returned inf, not a finite number"),
        (np.array([1.0, 2.0]), "returned ndarray, not a number"),
        ({}, "returned a dict without 'score' (it has nothing)"),
        ({"reward": 1}, "returned a dict without 'score' (it has reward)"),
        ({"score": None}, "returned None, not a number"),
    ],
)
def test_anything_else_is_no_score(answer: object, line: str) -> None:
    with pytest.raises(RewardError) as caught:
        as_score(answer)
    assert caught.value.message == line


def test_a_function_gets_verls_arguments_and_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, f"def mine({SIGNATURE}, *, scale):\n    return scale * extra_info['index']")
    assert RewardFunction(spec_of(path, name="mine", scale=3)).call(CALL) == Score(21.0)


def test_a_file_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 5", encoding="utf-8")
    path = write(tmp_path, f"import beside_it\ndef compute_score({SIGNATURE}):\n    return beside_it.VALUE")
    assert RewardFunction(spec_of(path)).call(CALL) == Score(5.0)


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        (None, {}, "my_reward.py: there is no such file"),
        ("def f(:", {}, "my_reward.py: cannot be loaded: SyntaxError: "),
        ("import no_such_library", {}, "cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit(3)", {}, "cannot be loaded: SystemExit: 3"),
        ("def other(): pass", {}, "has no function compute_score"),
        ("compute_score = 5", {}, "has no function compute_score"),
        ("def compute_score(solution_str): pass", {}, "is called with data_source, solution_str, ground_truth, extra_"),
        (f"def compute_score({SIGNATURE}): pass", {"scale": 1}, "got an unexpected keyword argument 'scale'"),
        (f"def compute_score({SIGNATURE}, scale): pass", {}, "missing a required argument: 'scale'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    tmp_path: Path, text: str | None, arguments: dict[str, Any], line: str
) -> None:
    path = tmp_path / "my_reward.py" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        RewardFunction(spec_of(path, **arguments))
    assert line in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("failures", "attempts", "calls"), [(2, 3, 3), (2, 2, 2), (0, 3, 1)])
def test_a_network_error_is_worth_another_call(tmp_path: Path, failures: int, attempts: int, calls: int) -> None:
    path = write(
        tmp_path,
        f"calls = []\ndef compute_score({SIGNATURE}):\n    calls.append(1)\n"
        f"    if len(calls) <= {failures}: raise ConnectionError('no judge')\n    return len(calls)",
    )
    function = RewardFunction(spec_of(path, attempts=attempts))
    if failures < attempts:
        assert function.call(CALL) == Score(float(calls))
    else:
        with pytest.raises(RewardError, match="ConnectionError: no judge"):
            function.call(CALL)


class ReadTimeout(Exception):
    """As a client library defines its own."""


ReadTimeout.__module__ = "httpx._exceptions"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ReadTimeout(), True),
        (FileNotFoundError(), False),
        (ValueError(), False),
        (SystemExit(), False),
    ],
)
def test_which_errors_are_of_the_network(error: BaseException, again: bool) -> None:
    assert is_network_error(error) == again


def test_an_error_becomes_one_short_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 10_000))) == 500
