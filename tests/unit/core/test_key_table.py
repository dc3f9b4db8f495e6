"""Every key is described, the pages are those of the source, and verl's keys are told apart."""

from __future__ import annotations

import pytest

from paceline.core.config import build_config, known_keys
from paceline.core.errors import ConfigError
from paceline.core.key_table import describe_keys, matching_keys
from paceline.core.verl_keys import PREFIX, VerlKey, verl_hint, verl_keys
from scripts.make_config_docs import CONFIGURATION, MIGRATION, render_configuration, render_migration

MAKE = "run python scripts/make_config_docs.py"


def test_the_pages_are_current() -> None:
    assert CONFIGURATION.read_text(encoding="utf-8") == render_configuration(), MAKE
    assert MIGRATION.read_text(encoding="utf-8") == render_migration(), MAKE


def test_every_key_is_described_once() -> None:
    rows = describe_keys()
    assert [row.key for row in rows] == list(known_keys())
    assert [row.key for row in rows if not (row.meaning.endswith(".") and row.type)] == []


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("rollout.n", "int, >= 1", "8"),
        ("actor.optim.betas", "list of 2 float", "[0.9, 0.95]"),
        ("algorithm.adv_estimator", "grpo or dr_grpo or rloo", "grpo"),
        ("ray.address", "str or none", "none"),
        ("trainer.logger", "list of console or tensorboard", "[console, tensorboard]"),
        ("async_training.partial_rollout", "bool", "true"),
        ("actor.optim.lr", "float, >= 0", "3e-05"),
        ("reward.reward_kwargs", "mapping", "{}"),
    ],
)
def test_types_and_defaults_in_words(key: str, kind: str, default: str) -> None:
    row = next(row for row in describe_keys() if row.key == key)
    assert (row.type, row.default) == (kind, default)


def test_words_search_names_and_meanings() -> None:
    assert [row.key for row in matching_keys("CLIP ratio_c")] == ["actor.clip_ratio_c"]
    assert "actor.kl_loss_coef" in [row.key for row in matching_keys("divergence weight")]
    assert matching_keys("no such thing") == []
    assert matching_keys("") == describe_keys()


@pytest.mark.parametrize("entry", verl_keys(), ids=lambda entry: entry.key)
def test_what_is_said_of_verls_keys_is_true(entry: VerlKey) -> None:
    known = known_keys()
    if entry.here:
        assert entry.here in known
        assert entry.status == "renamed" or entry.key == entry.here
    else:
        assert entry.key not in known
        assert entry.key.removeprefix(PREFIX) not in known
        assert entry.note


def test_no_key_of_verl_is_listed_twice() -> None:
    keys = [entry.key for entry in verl_keys()]
    assert sorted(set(keys)) == sorted(keys)


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        ({"rollout": {"test_freq": 1}}, "verl's rollout.test_freq is trainer.test_freq here"),
        (
            {"actor_rollout_ref": {"actor": {"clip_ratio": 0.2}}},
            r"verl's actor_rollout_ref\.actor\.clip_ratio is actor\.clip_ratio_low here \(and actor\.clip_ratio_high\)",
        ),
        ({"actor": {"ppo_epochs": 2}}, r"ppo_epochs is unsupported here: each batch is used once"),
        ({"data": {"train_batch_size": 0}}, r"data\.train_batch_size is irrelevant here: samples are drawn one by one"),
        ({"actor": {"optim": {"lrr": 1}}}, r"did you mean actor\.optim\.lr\?"),
    ],
)
def test_an_unknown_key_of_verl_is_refused_with_its_name_here(tree: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as found:
        build_config(tree)
    assert found.value.message.startswith("unknown key ")
    assert "\n" not in found.value.message


def test_other_unknown_keys_are_none_of_verls() -> None:
    assert verl_hint("foo.bar") is None
