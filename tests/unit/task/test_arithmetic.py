"""The arithmetic task: right answers, a split that cannot leak, a stable order and an exact score."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from paceline.task.arithmetic import Problem, Split, is_well_formed, problems, score

SPLITS: Final[dict[str, tuple[Problem, ...]]] = {split: problems(split) for split in get_args(Split)}


def operands(problem: Problem) -> tuple[int, str, int]:
    return int(problem.prompt[:2]), problem.prompt[2], int(problem.prompt[3:5])


def unordered_pairs(split: str) -> set[frozenset[int]]:
    return {frozenset((a, b)) for a, _, b in map(operands, SPLITS[split])}


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_right_and_well_formed(split: str) -> None:
    for problem in SPLITS[split]:
        a, operator, b = operands(problem)
        assert problem.prompt == f"{a}{operator}{b}="
        assert problem.answer == str(a + b if operator == "+" else a - b)
        assert is_well_formed(problem.answer)


def test_splits_share_no_pair_of_operands_in_either_order() -> None:
    assert not unordered_pairs("warm_start") & unordered_pairs("train")
    assert not unordered_pairs("warm_start") & unordered_pairs("validation")
    assert not unordered_pairs("train") & unordered_pairs("validation")


def test_splits_together_are_every_problem_once() -> None:
    ids = [problem.problem_id for members in SPLITS.values() for problem in members]
    assert len(ids) == len(set(ids)) == 2 * 90 * 90


def test_sizes() -> None:
    assert {split: len(members) for split, members in SPLITS.items()} == {
        "warm_start": 8076,
        "train": 5386,
        "validation": 2738,
    }


def test_order_is_stable_between_calls_and_releases() -> None:
    assert problems("validation") == SPLITS["validation"]
    assert [members[0].problem_id for members in SPLITS.values()] == ["24+87", "42+84", "56+42"]


@pytest.mark.parametrize("split", SPLITS)
def test_a_prefix_is_a_fair_sample(split: str) -> None:
    prefix = SPLITS[split][:1000]
    additions = sum(operator == "+" for _, operator, _ in map(operands, prefix))
    mean_operand = sum(a + b for a, _, b in map(operands, prefix)) / 2000
    assert 430 <= additions <= 570
    assert 51 <= mean_operand <= 58


def test_an_unknown_split_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="unknown split 'test'"):
        problems("test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("132", 1.0),
        ("132\n", 1.0),
        ("132\n\n", 0.0),
        (" 132", 0.0),
        ("132 ", 0.0),
        ("0132", 0.0),
        ("122", 0.0),
        ("", 0.0),
    ],
)
def test_score_is_exact_up_to_one_trailing_newline(response: str, expected: float) -> None:
    assert score(response, "132") == expected


def test_score_tells_the_sign() -> None:
    assert score("-38", "-38") == 1.0
    assert score("38", "-38") == 0.0


@pytest.mark.parametrize("response", ["7", "42", "132", "-3", "-38", "132\n", "007"])
def test_well_formed(response: str) -> None:
    assert is_well_formed(response)


@pytest.mark.parametrize("response", ["", "-", "1234", "--3", "3-", "1 2", "12a", "\u0661", "1\n\n", "+3"])
def test_not_well_formed(response: str) -> None:
    assert not is_well_formed(response)
