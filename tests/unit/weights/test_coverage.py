"""C06 and the reverse of C05: every mismatch of names, shapes, types and ties is refused, with all of them named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.core.errors import ConfigError, CoverageError
from paceline.core.manifest import WeightManifest
from paceline.weights.coverage import CoveragePlanner, CoverageRules, matches, plan_coverage
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
    planner = CoveragePlanner(rules)
    for _ in range(2):
        with pytest.raises(CoverageError) as again:
            planner.plan(manifest, expected, ties, {})
        assert again.value.message == caught.value.message
    return caught.value.message


def test_c06_a_good_mapping_gives_every_tensor_its_source() -> None:
    assert plan_coverage(sent(SENT), EXPECTED, (), GOOD).sources == {
        "layers.0.q.weight": "base_model.model.layers.0.q.base_layer.weight",
        "layers.0.k.weight": "module.layers.0.k.weight",
        "layers.0.v.weight": "layers.0.v.weight",
        "layers.0.bias": "layers.0.bias",
    }


def test_a_plan_is_made_anew_when_anything_that_it_depends_on_changes() -> None:
    planner = CoveragePlanner(GOOD)
    good = sent(SENT)
    first = planner.plan(good, EXPECTED, (), {})
    assert planner.plan(replace(good, version=8, digest="1" * 32), dict(EXPECTED), (), {}) is first
    changed: list[tuple[WeightManifest, dict[str, Shape], tuple[tuple[str, str], ...], dict[str, tuple[int, ...]], str]]
    changed = [
        (sent({**SENT, "layers.0.bias": ("float32", (5,))}), EXPECTED, (), {}, r"float32 \[5\]"),
        (sent({**SENT, "layers.0.bias": ("float16", (4,))}), EXPECTED, (), {}, "float16"),
        (sent(SENT, {"other": "layers.0.bias"}), {**EXPECTED, "other": ("float32", (5,))}, (), {}, "other"),
        (good, {**EXPECTED, "more": ("float32", (1,))}, (), {}, "'more' is missing"),
        (good, EXPECTED, (("layers.0.q.weight", "layers.0.k.weight"),), {}, "one tensor in the engine"),
        (good, EXPECTED, (), {"layers.0.bias": (2,)}, "strides"),
    ]
    for manifest, expected, ties, strided, reason in changed:
        with pytest.raises(CoverageError, match=reason):
            planner.plan(manifest, expected, ties, strided)
        assert planner.plan(good, EXPECTED, (), {}) == first


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


def test_another_layout_is_refused_by_name_with_its_strides() -> None:
    strided = {"layers.0.v.weight": (1, 4), "rotary.table": (1, 2)}
    with pytest.raises(CoverageError) as caught:
        plan_coverage(sent({**SENT, "layers.0.bias": ("bfloat16", (4,))}), EXPECTED, (), GOOD, strided)
    message = caught.value.message
    assert "'layers.0.v.weight' is row-major, the engine's 'layers.0.v.weight' has strides [1, 4]" in message
    assert "'layers.0.bias' is bfloat16" in message
    assert "rotary" not in message  # not written


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


# ---- any mixture ----------------------------------------------------------------------------------------------------

SHAPES: list[Shape] = [W, ("float32", (3, 4)), ("bfloat16", (4, 3))]
PATTERNS = st.sampled_from([(), (), (), ("a",), ("d.*",), ("b", "*")])


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[WeightManifest, dict[str, Shape], tuple[tuple[str, str], ...], CoverageRules]:
    """Anything sent to anything; mostly nearly right."""
    shape = draw(st.sampled_from(SHAPES))
    other = st.sampled_from([shape] * 15 + SHAPES)
    stored = {name: draw(other) for name in sorted(draw(st.sets(NAMES, min_size=1)))}
    prefix = draw(st.sampled_from(["", "module."]))
    aliases = {name: draw(st.sampled_from(sorted(stored))) for name in draw(st.sets(NAMES)) if name not in stored}
    wrong = draw(st.sets(NAMES, max_size=1)) if draw(st.booleans()) else set()
    expected = {name: draw(other) for name in sorted({*stored, *aliases} ^ wrong)} or {"a": W}
    pairs = st.tuples(st.sampled_from(sorted(expected)), st.sampled_from(sorted(expected)))
    ties = tuple(pair for pair in draw(st.lists(pairs, max_size=2)) if pair[0] != pair[1])
    rules = CoverageRules(
        (("module.", ""),) if prefix or draw(st.booleans()) else (),
        trainer_only=draw(PATTERNS),
        engine_static=draw(PATTERNS),
    )
    manifest = sent(
        {prefix + name: shape for name, shape in stored.items()},
        {prefix + name: prefix + target for name, target in aliases.items()},
    )
    return manifest, expected, ties, rules


@settings(max_examples=500, deadline=None)
@given(mixtures())
def test_a_plan_writes_each_tensor_of_the_engine_once_and_forgets_none_that_was_sent(
    mixture: tuple[WeightManifest, dict[str, Shape], tuple[tuple[str, str], ...], CoverageRules],
) -> None:
    manifest, expected, ties, rules = mixture
    try:
        sources = plan_coverage(manifest, expected, ties, rules).sources
    except CoverageError:
        return
    stored = {meta.name: (meta.dtype, meta.shape) for meta in manifest.tensors}
    origin = {**{name: name for name in stored}, **manifest.aliases}
    assert all(stored[origin[sent_name]] == expected[name] for name, sent_name in sources.items())
    static = {name for name in expected if matches(name, rules.engine_static)}
    assert sources.keys() == expected.keys() - static
    tied = {frozenset(tie) for tie in ties}
    for name, sent_name in sources.items():
        by_tie = any(frozenset((name, other)) in tied for other in sources)
        assert rules.engine_name(sent_name) == name or by_tie
    assert all(origin[sources[one]] == origin[sources[two]] for one, two in ties if {one, two} <= sources.keys())
    received = {origin[sent_name] for sent_name in sources.values()}
    for sent_name, stored_name in origin.items():
        declared = matches(sent_name, rules.trainer_only) or matches(rules.engine_name(sent_name), rules.trainer_only)
        assert declared or stored_name in received
