"""`checkpoint_engine.backend=filesystem` from the configuration to both ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import build_config
from paceline.core.errors import ConfigError
from paceline.core.version import Version
from paceline.runtime.registry import build_receiver, build_sender, next_life
from paceline.runtime.spec import RunSpec
from paceline.testing.publication import publish


def tree(**options: Any) -> dict[str, Any]:
    return {"checkpoint_engine": {"backend": "filesystem", "engine_kwargs": {"filesystem": options}}}


class NoObjects:
    """The port of an engine that these runs do not use."""

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

    def release(self, reference: bytes) -> None:
        raise AssertionError

    def holders(self, reference: bytes) -> Sequence[str]:
        raise AssertionError


def spec(url: str, **options: Any) -> RunSpec:
    return RunSpec("run", 1, url, url, url, {}, tree(url=url, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "set checkpoint_engine.engine_kwargs.filesystem.url"),
        ({"url": "weights"}, "url=weights has to be an absolute path or a URL"),
        ({"url": "/w", "keep": 1}, "checkpoint_engine.engine_kwargs.filesystem.keep"),
        ({"url": "/w", "keep_seconds": -1}, "checkpoint_engine.engine_kwargs.filesystem.keep_seconds"),
        ({"url": "/w", "shard_megabytes": 0}, "checkpoint_engine.engine_kwargs.filesystem.shard_megabytes"),
        ({"urll": "/w"}, "did you mean checkpoint_engine.engine_kwargs.filesystem.url?"),
    ],
)
def test_an_impossible_combination_is_one_clear_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(tree(**options))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_options_of_another_backend_are_allowed() -> None:
    config = build_config({"checkpoint_engine": {"engine_kwargs": {"filesystem": {"url": "s3://bucket/run"}}}})
    assert config.checkpoint_engine.backend == "shared_memory"
    assert next_life(config) == 1


def test_each_replica_keeps_copies_of_its_own() -> None:
    config = build_config({**tree(url="/w"), "rollout": {"num_replicas": 3}})
    assert config.weight_copies == 2 + 3 * config.arenas
    assert build_config({"rollout": {"num_replicas": 3}}).weight_copies == config.arenas


def test_both_ends_are_built_from_the_options(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    run = spec(url, keep=2, keep_seconds=0, shard_megabytes=1)
    made = build_sender(run, threads=1, objects=NoObjects())
    named = [("a", torch.ones(1 << 18)), ("b", torch.ones(1 << 18))]
    manifests = [publish(made, named, Version(1, n).packed) for n in range(3)]
    found = sorted(path.relative_to(url).as_posix() for path in Path(url).rglob("*.safetensors"))
    assert found == [f"1.{n}/weights-0000{index}-of-00002.safetensors" for n in (1, 2) for index in (1, 2)]
    staged = build_receiver(run, "replica-0", objects=NoObjects()).stage(manifests[-1])
    assert staged.digest == manifests[-1].digest
    made.close()
    assert next_life(run.config) == 2


def test_a_place_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").touch()
    with pytest.raises(ConfigError, match="holds no weight versions"):
        next_life(spec(str(tmp_path)).config)
