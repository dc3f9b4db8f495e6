"""The coverage contract: every tensor of the engine has exactly one source, every sent tensor a receiver.

Pure: from what was sent, what the engine serves from and the declared rules comes a plan, or a `CoverageError` with
*all* offending names. It is asked before a byte is fetched, so a mismatch changes nothing anywhere.

    engine tensor   has one source, or is tied to one that has, or is declared engine-static
    sent tensor     has a receiver under one of its names, or is declared trainer-only
    a pair          has the same dtype, shape and strides (what is sent is row-major); an equal number of elements is no
                    excuse, and nothing is cast here

A tie is a fact, never a wish: names that are one tensor in the engine must have been sent as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from paceline.core.errors import ConfigError, CoverageError
from paceline.core.manifest import TensorMeta, WeightManifest, layout_of

Expected = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class CoverageRules:
    """How names of the trainer become names of the engine, and what has no partner by intention.

    `name_rules` are (old, new), applied in order, each once: `old` ending with a dot is a prefix of the whole name
    ("module." -> ""), `old` starting with a dot is a component after the first (".base_layer" -> "").
    `trainer_only` and `engine_static` are names or shell patterns ("value_head.*").

    Example: `CoverageRules((("module.", ""), (".base_layer", "")), ("value_head.*",))`.

    Raises:
        ConfigError: a rule that is neither.
    """

    name_rules: tuple[tuple[str, str], ...] = ()
    trainer_only: tuple[str, ...] = ()
    engine_static: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for old, _ in self.name_rules:
            if len(old) < 2 or old.startswith(".") == old.endswith("."):
                raise ConfigError(
                    f"name rule {old!r} is neither a prefix (like 'module.') nor a component (like '.base_layer')"
                )

    def engine_name(self, sent: str) -> str:
        """The engine's name for a sent name."""
        for old, new in self.name_rules:
            if old.endswith("."):
                sent = new + sent.removeprefix(old) if sent.startswith(old) else sent
            else:
                sent = f"{sent}.".replace(f"{old}.", f"{new}.", 1).removesuffix(".")
        return sent


@dataclass(frozen=True)
class CoveragePlan:
    """`sources` maps every tensor the engine is given to the sent name it comes from."""

    sources: dict[str, str]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these names or fits one of these shell patterns."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def plan_coverage(
    manifest: WeightManifest,
    expected: Expected,
    ties: Sequence[tuple[str, str]],
    rules: CoverageRules,
    strided: Mapping[str, tuple[int, ...]] | None = None,
) -> CoveragePlan:
    """Match a version with an engine. `ties` are pairs of the engine's names that are one tensor; `strided` are the
    engine's tensors whose memory is not row-major, with their strides in elements.

    Raises:
        CoverageError: with every name that is missing, undeclared, doubled, mis-shaped, mistyped, laid out otherwise
            or wrongly tied.
    """
    stored = {meta.name: meta for meta in manifest.tensors}
    origin = {**{name: name for name in stored}, **manifest.aliases}
    offered: dict[str, list[str]] = defaultdict(list)
    for sent in origin:
        if not _trainer_only(sent, rules):
            offered[rules.engine_name(sent)].append(sent)
    sources = {name: offered[name][0] for name in expected if name in offered}
    for first, second in ties:
        for one, other in ((first, second), (second, first)):
            if one in sources and other in expected and other not in sources:
                sources[other] = sources[one]
    reasons = [
        *_missing(expected, sources, rules),
        *_without_receiver(origin, sources, rules),
        *_doubled(offered, origin),
        *_unlike(expected, sources, origin, stored),
        *_strided(strided or {}, sources),
        *_untied(ties, sources, origin),
    ]
    if reasons:
        raise CoverageError(
            f"version {manifest.version} does not cover the engine, nothing was changed: {'; '.join(reasons)}"
        )
    return CoveragePlan(sources)


class CoveragePlanner:
    """`plan_coverage` of one version after another: the same question has the same answer, and is not asked twice."""

    def __init__(self, rules: CoverageRules) -> None:
        self._rules = rules
        self._asked: tuple[object, ...] | None = None
        self._plan = CoveragePlan({})

    def plan(
        self,
        manifest: WeightManifest,
        expected: Expected,
        ties: Sequence[tuple[str, str]],
        strided: Mapping[str, tuple[int, ...]],
    ) -> CoveragePlan:
        """Raises what `plan_coverage` raises."""
        asked = (layout_of(manifest), dict(expected), list(ties), dict(strided))
        if asked != self._asked:
            self._plan = plan_coverage(manifest, expected, ties, self._rules, strided)
            self._asked = asked
        return self._plan


def _trainer_only(sent: str, rules: CoverageRules) -> bool:
    return matches(sent, rules.trainer_only) or matches(rules.engine_name(sent), rules.trainer_only)


def _missing(expected: Expected, sources: Mapping[str, str], rules: CoverageRules) -> list[str]:
    reasons: list[str] = []
    for name in expected:
        static = matches(name, rules.engine_static)
        if static and name in sources:
            reasons.append(f"{name!r} is declared engine-static, but was sent as {sources[name]!r}")
        elif not static and name not in sources:
            reasons.append(f"{name!r} is missing")
    return reasons


def _without_receiver(origin: Mapping[str, str], sources: Mapping[str, str], rules: CoverageRules) -> list[str]:
    received = {origin[sent] for sent in sources.values()}
    used = set(sources.values())
    # Another name of a tensor that arrives needs no receiver of its own, as long as the engine knows no such name.
    return [
        f"{sent!r} has no receiver{_rewritten(sent, rules)} and is not declared trainer-only"
        for sent, stored in origin.items()
        if sent not in used and stored not in received and not _trainer_only(sent, rules)
    ]


def _doubled(offered: Mapping[str, Sequence[str]], origin: Mapping[str, str]) -> list[str]:
    return [
        f"{' and '.join(repr(sent) for sent in sent_names)} both become {name!r}"
        for name, sent_names in offered.items()
        if len({origin[sent] for sent in sent_names}) > 1
    ]


def _unlike(
    expected: Expected, sources: Mapping[str, str], origin: Mapping[str, str], stored: Mapping[str, TensorMeta]
) -> list[str]:
    reasons: list[str] = []
    for name, sent in sources.items():
        meta = stored[origin[sent]]
        dtype, shape = expected[name]
        if (meta.dtype, tuple(meta.shape)) != (dtype, tuple(shape)):
            given = f"{meta.dtype} {list(meta.shape)}"
            reasons.append(f"{sent!r} is {given}, the engine's {name!r} is {dtype} {list(shape)}")
    return reasons


def _strided(strided: Mapping[str, tuple[int, ...]], sources: Mapping[str, str]) -> list[str]:
    return [
        f"{sources[name]!r} is row-major, the engine's {name!r} has strides {list(strides)}"
        for name, strides in strided.items()
        if name in sources
    ]


def _untied(ties: Sequence[tuple[str, str]], sources: Mapping[str, str], origin: Mapping[str, str]) -> list[str]:
    return [
        f"{first!r} and {second!r} are one tensor in the engine, but {sources[first]!r} and {sources[second]!r} "
        "were sent as two"
        for first, second in ties
        if first in sources and second in sources and origin[sources[first]] != origin[sources[second]]
    ]


def _rewritten(sent: str, rules: CoverageRules) -> str:
    name = rules.engine_name(sent)
    return "" if name == sent else f" (as {name!r})"
