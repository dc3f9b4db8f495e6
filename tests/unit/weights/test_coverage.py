"""C06 and the reverse of C05: every mismatch of names, shapes, types and ties is refused, with all of them named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.core.errors import ConfigError, CoverageError
from paceline.core.manifest import WeightManifest
from paceline.weights.coverage import CoverageRules, plan_coverage
from paceline.weights.layout import plan_layout

Shape = tuple[str, tuple[int, ...]]
EXPECTED: dict[str, Shape] = {
    "layers.0.q.weight": ("float32", (4, 3)),
    "layers.0.k.weight": ("float32", (4, 3)),
    "layers.0.v.weight": ("float32", (4, 3)),
    "layers.0.bias": ("float32", (4,)),
}
SENT: dict[str, Shape] = {
    "base_model.model.layers.0.q.base_layer.weight": ("float32", (4, 3)),
    "module.layers.0.k.weight": ("float32", (4, 3)),
    "layers.0.v.weight": ("float32", (4, 3)),
    "layers.0.bias": ("float32", (4,)),
    "value_head.weight": ("float32", (1, 4)),
}
GOOD = CoverageRules(
    name_rules=(("base_model.model.", ""), ("module.", ""), (".base_layer", "")), trainer_only=("value_head.*",)
)


def sent(tensors: dict[str, Shape], aliases: dict[str, str] | None = None) -> WeightManifest:
    metas, total = plan_layout(tensors)
    return WeightManifest(7, metas, aliases or {}, total, "0" * 32, "arena", "address")


def refusal(
    manifest: WeightManifest,
    rules: CoverageRules = GOOD,
    expected: dict[str, Shape] = EXPECTED,
    ties: tuple[tuple[str, str], ...] = (),
) -> str:
    with pytest.raises(CoverageError) as caught:
        plan_coverage(manifest, expected, ties, rules)
    return caught.value.message


def test_c06_a_good_mapping_gives_every_tensor_its_source() -> None:
    assert plan_coverage(sent(SENT), EXPECTED, (), GOOD).sources == {
        "layers.0.q.weight": "base_model.model.layers.0.q.base_layer.weight",
        "layers.0.k.weight": "module.layers.0.k.weight",
        "layers.0.v.weight": "layers.0.v.weight",
        "layers.0.bias": "layers.0.bias",
    }


def test_c06_a_missing_tensor_is_named() -> None:
    without = {name: shape for name, shape in SENT.items() if name != "layers.0.bias"}
    assert "'layers.0.bias' is missing" in refusal(sent(without))


def test_c06_a_mapping_that_misses_one_names_both_ends() -> None:
    rules = CoverageRules((("base_model.model.", ""), (".base_layer", "")), GOOD.trainer_only)
    message = refusal(sent(SENT), rules)
    assert "'layers.0.k.weight' is missing" in message
    assert "'module.layers.0.k.weight' has no receiver and is not declared trainer-only" in message


def test_c06_two_sources_of_one_tensor_are_both_named() -> None:
    doubled = {**SENT, "module.layers.0.q.weight": ("float32", (4, 3))}
    message = refusal(sent(doubled))
    assert (
        "'base_model.model.layers.0.q.base_layer.weight' and 'module.layers.0.q.weight' both become "
        "'layers.0.q.weight'" in message
    )


def test_c06_an_equal_number_of_elements_is_no_excuse() -> None:
    message = refusal(sent({**SENT, "layers.0.v.weight": ("float32", (3, 4))}))
    assert "'layers.0.v.weight' is float32 [3, 4], the engine's 'layers.0.v.weight' is float32 [4, 3]" in message


def test_another_type_is_refused() -> None:
    message = refusal(sent({**SENT, "layers.0.bias": ("bfloat16", (4,))}))
    assert "'layers.0.bias' is bfloat16 [4], the engine's 'layers.0.bias' is float32 [4]" in message


def test_c06_an_undeclared_extra_is_named() -> None:
    message = refusal(sent(SENT), CoverageRules(GOOD.name_rules))
    assert "'value_head.weight' has no receiver and is not declared trainer-only" in message


def test_all_offences_are_in_one_message() -> None:
    bad = {"layers.0.v.weight": ("float32", (3, 4)), "x": ("bool", ()), "y": ("bool", ())}
    message = refusal(sent(bad))
    for name in ("'x'", "'y'", "'layers.0.q.weight'", "'layers.0.k.weight'", "'layers.0.bias'", "[3, 4]"):
        assert name in message


# ---- C05: ties ------------------------------------------------------------------------------------------------------

W: Shape = ("float32", (4, 3))
TIED = sent({"embed": W}, {"head": "embed"})
APART = sent({"embed": W, "head": W})


def test_c05_a_tie_serves_an_engine_that_ties_one_that_does_not_and_one_that_has_only_a_part() -> None:
    both = {"embed": W, "head": W}
    assert plan_coverage(TIED, both, (("embed", "head"),), GOOD).sources == {"embed": "embed", "head": "head"}
    assert plan_coverage(TIED, both, (), GOOD).sources == {"embed": "embed", "head": "head"}
    assert plan_coverage(TIED, {"embed": W}, (), GOOD).sources == {"embed": "embed"}
    assert plan_coverage(TIED, {"head": W}, (), GOOD).sources == {"head": "head"}


def test_c05_a_tensor_sent_under_one_name_serves_all_names_that_the_engine_ties() -> None:
    both, ties = {"embed": W, "head": W}, (("embed", "head"),)
    assert plan_coverage(sent({"head": W}), both, ties, GOOD).sources == {"embed": "head", "head": "head"}
    assert "'head' is missing" in refusal(sent({"embed": W}), expected=both)


def test_c05_weights_that_drifted_apart_are_refused_by_an_engine_that_ties_them() -> None:
    message = refusal(APART, expected={"embed": W, "head": W}, ties=(("embed", "head"),))
    assert "'embed' and 'head' are one tensor in the engine, but 'embed' and 'head' were sent as two" in message


def test_two_names_of_one_tensor_may_become_one() -> None:
    manifest = sent({"module.w": W}, {"w": "module.w"})
    assert set(plan_coverage(manifest, {"w": W}, (), GOOD).sources) == {"w"}


# ---- declared partners ----------------------------------------------------------------------------------------------


def test_an_engine_static_tensor_needs_no_source_and_may_have_none() -> None:
    expected: dict[str, Shape] = {"w": W, "rope.inv_freq": ("float32", (8,))}
    rules = CoverageRules(engine_static=("rope.*",))
    assert plan_coverage(sent({"w": W}), expected, (), rules).sources == {"w": "w"}
    both = sent({"w": W, "rope.inv_freq": ("float32", (8,))})
    assert "'rope.inv_freq' is declared engine-static, but was sent" in refusal(both, rules, expected)
    assert "'rope.inv_freq' is missing" in refusal(sent({"w": W}), CoverageRules(), expected)


def test_a_trainer_only_tensor_cannot_also_be_the_engines() -> None:
    assert "'w' is missing" in refusal(sent({"w": W}), CoverageRules(trainer_only=("w",)), {"w": W})


@pytest.mark.parametrize("old", ["", ".", "layers", ".layers.", "x.y"])
def test_a_rule_that_is_neither_prefix_nor_component_is_refused(old: str) -> None:
    with pytest.raises(ConfigError, match="neither a prefix"):
        CoverageRules(((old, ""),))


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (("module.", ""), "module.a", "a"),
        (("module.", ""), "a.module.b", "a.module.b"),
        (("module.", ""), "modules.a", "modules.a"),
        (("model.", "transformer."), "model.a", "transformer.a"),
        ((".base_layer", ""), "q.base_layer.weight", "q.weight"),
        ((".base_layer", ""), "q.base_layer", "q"),
        ((".base_layer", ""), "q.base_layers.weight", "q.base_layers.weight"),
        ((".base_layer", ".inner"), "q.base_layer.weight", "q.inner.weight"),
    ],
)
def test_rules_rewrite_whole_components(rule: tuple[str, str], before: str, after: str) -> None:
    assert CoverageRules((rule,)).engine_name(before) == after


NAMES = st.sampled_from(["a", "b", "c", "d.e", "d.f"])


@given(st.sets(NAMES, min_size=1), st.sets(NAMES, min_size=1))
def test_a_plan_exists_exactly_when_the_names_are_equal(have: set[str], want: set[str]) -> None:
    manifest = sent(dict.fromkeys(sorted(have), W))
    expected = dict.fromkeys(sorted(want), W)
    if have == want:
        assert plan_coverage(manifest, expected, (), GOOD).sources == {name: name for name in want}
    else:
        message = refusal(replace(manifest), expected=expected)
        assert all(f"{name!r} is missing" in message for name in want - have)
        assert all(f"{name!r} has no receiver" in message for name in have - want)
