"""Files and overrides: what they mean, and one line for everything that can be wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.config_files import load_config
from paceline.core.config import Config
from paceline.core.errors import ConfigError


def refusal(file: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_nothing_given_is_the_default() -> None:
    assert load_config(None, []) == Config()


def test_a_file_and_overrides_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor:\n  optim:\n    lr: 3e-4\n    weight_decay: 0.1\ntrainer:\n  seed: 3\n", encoding="utf-8")
    config = load_config(file, ["trainer.seed=4", "actor.optim.lr=6e-4", "trainer.logger=[console]", "trainer.seed=5"])
    assert (config.actor.optim.lr, config.actor.optim.weight_decay) == (6e-4, 0.1)
    assert config.trainer.seed == 5
    assert config.trainer.logger == ("console",)


def test_values_are_yaml() -> None:
    config = load_config(None, ["actor.optim.betas=[0.8, 0.99]", "model.path=null", "trainer.val_before_train=false"])
    assert config.actor.optim.betas == (0.8, 0.99)
    assert config.model.path is None
    assert config.trainer.val_before_train is False


def test_an_equals_sign_belongs_to_the_value() -> None:
    assert load_config(None, ["trainer.experiment_name=a=b"]).trainer.experiment_name == "a=b"


def test_a_value_may_refer_to_another(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {seed: 7}\ndata: {seed: '${trainer.seed}'}\n", encoding="utf-8")
    assert load_config(file, []).data.seed == 7
    assert load_config(file, ["trainer.seed=8"]).data.seed == 8


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n", encoding="utf-8")
    assert load_config(file, []) == Config()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("foo", "'foo' is not of the form key.sub=value"),
        ("=1", "is not of the form"),
        ("trainer..seed=1", "is not of the form"),
        ("trainer.seed=[1,", "trainer.seed=[1,: line "),
        ("trainer.sed=1", "unknown key trainer.sed; did you mean trainer.seed?"),
        ("trainer=1", "unknown key trainer"),
        ("trainer.seed=abc", "trainer.seed: "),
        ("trainer.seed=", "trainer.seed: "),
        ("rollout.n=1", "rollout.n must be at least 2"),
        ("data.seed=${nowhere}", "nowhere"),
        ("rollout.total_rollout_steps=3", "is less than one update needs"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, words: str) -> None:
    assert words in refusal(None, override)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"trainer: [1,\n", "run.yaml: line 2, column 1: "),
        (b"trainer: {seed: 1}\ntrainer: {seed: 2}\n", "run.yaml: line 2, column 1: found duplicate key trainer"),
        (b"- trainer\n", "run.yaml: has to be a mapping of keys to values, not a list"),
        (b"5\n", "run.yaml: "),
        (b"\xff\xfe", "no UTF-8 text"),
        (b"1: 2\n", "unknown key 1"),
        (b"trainer: !!python/object:os.system {}\n", "run.yaml: line 1"),
        (b"actor:\n  optim:\n    lr: fast\n", "actor.optim.lr: "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    assert words in refusal(file)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml") == f"cannot read {tmp_path / 'none.yaml'}: No such file or directory"
    assert "Is a directory" in refusal(tmp_path)
