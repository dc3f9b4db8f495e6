"""The keys of `checkpoint_engine.*` that decide how weights are sent: each changes what happens."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import build_config
from paceline.core.errors import ConfigError, DigestMismatch, NonFiniteWeights
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.runtime.registry import build_coverage_rules, build_receiver, build_sender
from paceline.runtime.spec import RunSpec
from paceline.testing.publication import publish

Named = list[tuple[str, torch.Tensor]]


class NoObjects:
    """The transport of a run on one node: nobody may use it."""

    @property
    def node(self) -> str:
        raise AssertionError

    def check_room(self, needed_bytes: int) -> None:
        raise AssertionError

    def put(self, data: memoryview) -> bytes:
        raise AssertionError

    def get(self, reference: bytes, *, holder: str, deadline_seconds: float) -> memoryview:
        raise AssertionError

    def done(self, reference: bytes, *, holder: str) -> None:
        raise AssertionError

    def holders(self, reference: bytes) -> list[str]:
        raise AssertionError

    def release(self, reference: bytes) -> None:
        raise AssertionError


@contextmanager
def ends(directory: Path, **checkpoint_engine: Any) -> Iterator[tuple[WeightSender, WeightReceiver]]:
    tree = {"checkpoint_engine": checkpoint_engine, "rollout": {"dtype": "bfloat16"}}
    spec = RunSpec("run", 1, str(directory), str(directory), str(directory), {}, tree)
    sender, receiver = build_sender(spec, 1, NoObjects()), build_receiver(spec, "replica-0", NoObjects())
    yield sender, receiver
    receiver.close()
    sender.close()


def maps(word: str) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(word)


@pytest.mark.parametrize(("arena", "word"), [("memfd", "memfd:paceline"), ("file", "/arena-")])
def test_arena_decides_what_versions_lie_in(tmp_path: Path, arena: str, word: str) -> None:
    gc.collect()  # maps of tests before this one
    with ends(tmp_path, engine_kwargs={"shared_memory": {"arena": arena}}) as (sender, _):
        publish(sender, [("w", torch.ones(4))], 1)
        assert maps(word) == build_config({}).arenas
    assert maps(word) == 0


def test_keep_decides_what_is_cast(tmp_path: Path) -> None:
    named: Named = [("a.router.bias", torch.ones(2)), ("b", torch.ones(2))]
    for keep, types in (((), ["bfloat16", "bfloat16"]), (("*.router.bias",), ["float32", "bfloat16"])):
        with ends(tmp_path, keep=keep) as (sender, _):
            assert [meta.dtype for meta in publish(sender, named, 1).tensors] == types


@pytest.mark.parametrize(("nonfinite", "refused"), [("error", True), ("skip", True), ("off", False)])
def test_nonfinite_decides_what_a_nan_does(tmp_path: Path, nonfinite: str, refused: bool) -> None:
    with ends(tmp_path, nonfinite=nonfinite) as (sender, receiver):
        if refused:
            with pytest.raises(NonFiniteWeights):
                publish(sender, [("w", torch.tensor([math.nan]))], 1)
        else:
            receiver.stage(publish(sender, [("w", torch.tensor([math.nan]))], 1)).release()


def damaged(sender: WeightSender, version: int, moving: float) -> WeightManifest:
    """A version of two tensors, the first one damaged after it was published."""
    manifest = publish(sender, [("same", torch.ones(64)), ("moving", torch.full((64,), moving))], version)
    store = sender._store  # type: ignore[attr-defined]  # noqa: SLF001
    arena = next(arena for arena in store._arenas if arena.arena_id == manifest.arena_id)  # noqa: SLF001
    assert arena.begin_write()
    arena.array[0] ^= 1
    arena.end_write(version)
    return manifest


@pytest.mark.parametrize(
    ("verify", "noticed"), [("full", [True, True]), ("changed", [True, False]), ("off", [False] * 2)]
)
def test_verify_decides_what_is_noticed(tmp_path: Path, verify: str, noticed: list[bool]) -> None:
    with ends(tmp_path, verify=verify) as (sender, receiver):
        for version, expected in zip((1, 3), noticed, strict=True):
            manifest = damaged(sender, version, moving=float(version))
            if expected:
                with pytest.raises(DigestMismatch):
                    receiver.stage(manifest)
            else:
                receiver.stage(manifest).release()
            receiver.stage(
                publish(sender, [("same", torch.ones(64)), ("moving", torch.zeros(64))], version + 1)
            ).release()


def test_names_are_the_rules_of_the_configuration() -> None:
    tree = {"name_rules": [["module.", ""]], "trainer_only": ["value_head.*"], "engine_static": ["rope.*"]}
    rules = build_coverage_rules(build_config({"checkpoint_engine": tree}))
    assert rules.engine_name("module.w") == "w"
    assert (rules.trainer_only, rules.engine_static) == (("value_head.*",), ("rope.*",))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"name_rules": [["module", ""]]}, "'module' is neither a prefix"),
        ({"name_rules": ["module."]}, "checkpoint_engine.name_rules"),
        ({"verify": "some"}, "checkpoint_engine.verify"),
        ({"nonfinite": "warn"}, "checkpoint_engine.nonfinite"),
        ({"engine_kwargs": {"shared_memory": {"arena": "shm"}}}, "checkpoint_engine.engine_kwargs.shared_memory.arena"),
        (
            {"verify": "changed", "backend": "filesystem", "engine_kwargs": {"filesystem": {"url": "/w"}}},
            "verify=changed is not possible with backend=filesystem",
        ),
    ],
)
def test_an_impossible_value_is_one_clear_line(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"checkpoint_engine": tree})
    assert words in caught.value.message
    assert "\n" not in caught.value.message
