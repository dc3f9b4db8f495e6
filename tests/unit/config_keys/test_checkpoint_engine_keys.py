"""Keys of the ends of a checkpoint engine, as the registry makes them of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import NonFiniteWeights, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.core.weight_ports import WeightSender
from paceline.runtime import registry
from paceline.runtime.spec import RunSpec
from paceline.testing.object_transport import InProcessObjects, ObjectCluster
from paceline.testing.publication import publish
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import shows

MIB = 1 << 20


@contextmanager
def sender_of(spec: RunSpec, objects: InProcessObjects | None = None) -> Iterator[WeightSender]:
    sender = registry.build_sender(spec, 1, objects or InProcessObjects(ObjectCluster(), "home"))
    try:
        yield sender
    finally:
        sender.close()


def capture(sender: WeightSender, n: int = 0, elements: int = 64) -> WeightManifest:
    named = [("a", torch.full((elements,), float(n))), ("b.scale", torch.full((elements,), float(n)))]
    return publish(sender, named, Version(1, n).packed)


def settings_of(tmp_path: Path, **options: object) -> dict[str, object]:
    """The filesystem backend with these options, in `tmp_path/versions`."""
    prefix = "checkpoint_engine.engine_kwargs.filesystem"
    given: dict[str, object] = {"url": str(tmp_path / "versions"), "keep_seconds": 0.0, **options}
    return {"checkpoint_engine.backend": "filesystem", **{f"{prefix}.{key}": value for key, value in given.items()}}


@shows("checkpoint_engine.backend")
def test_the_backend_decides_where_versions_lie(make_spec: MakeSpec, tmp_path: Path) -> None:
    def address(settings: dict[str, object]) -> str:
        with sender_of(make_spec(settings)) as sender:
            return capture(sender).address

    addresses = {
        address({"checkpoint_engine.backend": "shared_memory"}),
        address({"checkpoint_engine.backend": "ray_object"}),
        address(settings_of(tmp_path)),
    }
    assert len(addresses) == 3


@pytest.mark.parametrize(("verify", "hashed"), [("full", True), ("changed", True), ("off", False)])
@shows("checkpoint_engine.verify")
def test_what_is_staged_is_hashed_unless_it_is_off(make_spec: MakeSpec, verify: str, hashed: bool) -> None:
    spec = make_spec({"checkpoint_engine.verify": verify})
    objects = InProcessObjects(ObjectCluster(), "home")
    with sender_of(spec, objects) as sender:
        manifest = capture(sender)
        receiver = registry.build_receiver(spec, "replica-0", objects)
        staged = receiver.stage(manifest)
        assert staged.digest == (manifest.digest if hashed else "")
        staged.release()
        receiver.close()


@shows("checkpoint_engine.keep")
def test_kept_tensors_are_sent_in_their_own_type(make_spec: MakeSpec) -> None:
    def types(keep: list[str]) -> dict[str, str]:
        spec = make_spec({"rollout.dtype": "bfloat16", "checkpoint_engine.keep": keep})
        with sender_of(spec) as sender:
            return {tensor.name: tensor.dtype for tensor in capture(sender).tensors}

    assert types([]) == {"a": "bfloat16", "b.scale": "bfloat16"}
    assert types(["*.scale"]) == {"a": "bfloat16", "b.scale": "float32"}


@shows("checkpoint_engine.any_value")
def test_tensors_declared_any_value_may_hold_nan(make_spec: MakeSpec) -> None:
    named = [("w", torch.ones(2)), ("stats", torch.tensor([math.nan, 1.0]))]
    with sender_of(make_spec({})) as sender, pytest.raises(NonFiniteWeights, match="'stats'"):
        publish(sender, named, 1)
    with sender_of(make_spec({"checkpoint_engine.any_value": ["stats"]})) as sender:
        assert publish(sender, named, 1).version == 1


@shows("checkpoint_engine.engine_kwargs.shared_memory.arena")
def test_arenas_lie_in_memory_or_in_files(make_spec: MakeSpec) -> None:
    def mapped(arena: str) -> str:
        spec = make_spec({"checkpoint_engine.engine_kwargs.shared_memory.arena": arena})
        with sender_of(spec) as sender:
            capture(sender)
            return Path("/proc/self/maps").read_text(encoding="utf-8")

    assert "/memfd:" in mapped("memfd")
    assert "/memfd:" not in mapped("file")


@shows("checkpoint_engine.engine_kwargs.filesystem.url")
def test_versions_lie_below_the_url(make_spec: MakeSpec, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with sender_of(make_spec(settings_of(tmp_path, url=str(tmp_path / name)))) as sender:
            capture(sender)
        assert [path for path in (tmp_path / name).rglob("*") if path.is_file()]


def kept_after(make_spec: MakeSpec, tmp_path: Path, count: int, **options: Any) -> int:
    """Versions that a receiver can still stage after `count` captures."""
    spec = make_spec(settings_of(tmp_path, **options))
    objects = InProcessObjects(ObjectCluster(), "home")
    staged = 0
    with sender_of(spec, objects) as sender:
        manifests = [capture(sender, n) for n in range(count)]
        receiver = registry.build_receiver(spec, "replica-0", objects)
        for manifest in manifests:
            try:
                receiver.stage(manifest).release()
            except SyncError:
                continue
            staged += 1
        receiver.close()
    return staged


@shows("checkpoint_engine.engine_kwargs.filesystem.keep")
def test_the_newest_versions_stay_readable(make_spec: MakeSpec, tmp_path: Path) -> None:
    assert kept_after(make_spec, tmp_path / "two", 6, keep=2) == 2
    assert kept_after(make_spec, tmp_path / "four", 6, keep=4) == 4


@shows("checkpoint_engine.engine_kwargs.filesystem.keep_seconds")
def test_a_young_version_stays_whatever_their_number(make_spec: MakeSpec, tmp_path: Path) -> None:
    assert kept_after(make_spec, tmp_path / "short", 6, keep=2, keep_seconds=0.0) == 2
    assert kept_after(make_spec, tmp_path / "long", 6, keep=2, keep_seconds=600.0) == 6


@shows("checkpoint_engine.engine_kwargs.filesystem.shard_megabytes")
def test_files_are_no_larger_than_a_shard(make_spec: MakeSpec, tmp_path: Path) -> None:
    def data_files(megabytes: int) -> int:
        root = tmp_path / str(megabytes)
        with sender_of(make_spec(settings_of(tmp_path, url=str(root), shard_megabytes=megabytes))) as sender:
            capture(sender, elements=MIB // 4)
        return sum(path.stat().st_size >= MIB for path in root.rglob("*") if path.is_file())

    assert (data_files(1), data_files(8)) == (2, 1)
