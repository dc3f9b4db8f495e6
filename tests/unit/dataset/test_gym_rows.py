"""Data sets of reasoning-gym by name: parameters, problems, and what a wrong name says."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.core.sections.data import DataConfig
from paceline.dataset.gym_rows import GymRows, GymSpec, parse_spec
from paceline.dataset.opening import open_training, open_validation
from paceline.dataset.verl_row import parse_row

CHAIN = "reasoning_gym:chain_sum?max_terms=3&max_digits=2"


def rows_of(text: str, *, chat: bool = False, seed: int = 0) -> GymRows:
    return GymRows(text, prompt_key="prompt", chat=chat, seed=seed, size=100)


def test_a_name_with_its_parameters() -> None:
    assert parse_spec("reasoning_gym:leg_counting") == GymSpec("leg_counting", {}, None)
    assert parse_spec(f"{CHAIN}&allow_negation=true&x=[1,2]&system_prompt=direct&word=abc") == GymSpec(
        "chain_sum",
        {"max_terms": 3, "max_digits": 2, "allow_negation": True, "x": [1, 2], "word": "abc"},
        "direct",
    )


def test_problems_are_the_same_whenever_they_are_made() -> None:
    rows, again, other = rows_of(CHAIN), rows_of(CHAIN), rows_of(CHAIN, seed=1)
    assert len(rows) == 100
    assert rows.row(7) == again.row(7) != other.row(7)
    row = parse_row(rows.row(7), "prompt")
    assert row.data_source == "reasoning_gym/chain_sum"
    assert isinstance(row.prompt, str)
    terms = row.prompt.partition(": ")[2].removesuffix(" =")
    assert len(terms.split()) <= 5
    assert int(row.ground_truth) == sum(int(term) for term in terms.replace("- ", "-").replace("+ ", "").split())
    assert row.extra_info == {
        "dataset": "chain_sum",
        "parameters": {"seed": 0, "size": 100, "max_terms": 3, "max_digits": 2},
        "index": 7,
    }


def test_a_chat_model_is_asked_in_a_chat_with_the_system_prompt() -> None:
    system, user = rows_of(f"{CHAIN}&system_prompt=direct", chat=True).row(0)["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "<answer>" in system["content"]
    text = rows_of(f"{CHAIN}&system_prompt=direct").row(0)["prompt"]
    assert text == f"{system['content']}\n{user['content']}"


def test_validation_has_other_problems_of_the_same_data_set() -> None:
    data = DataConfig(train_files=(CHAIN,), val_size=5)
    (training,) = open_training(data, chat=False, spill_dir=None)
    (held_out,) = open_validation(data, chat=False, spill_dir=None)
    assert (len(training), len(held_out)) == (1_000_000, 5)
    drawn = {training.row(place)["prompt"] for place in range(200)}
    assert not drawn & {held_out.row(place)["prompt"] for place in range(5)}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reasoning_gym:chainsum", "reasoning-gym has no such data set; did you mean chain_sum?"),
        ("reasoning_gym:", "reasoning-gym has no such data set"),
        ("reasoning_gym:chain_sum?max_terms=0", "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?colour=red", "unexpected keyword argument 'colour'"),
        ("reasoning_gym:chain_sum?max_terms", "is not of the form parameter=value"),
        ("reasoning_gym:chain_sum?system_prompt=mine", "system_prompt=mine: reasoning-gym has DeepSeekZero, default"),
    ],
)
def test_a_wrong_name_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(text)
    assert line in caught.value.message
    assert "\n" not in caught.value.message
