"""Keys of the delta: what is sent, and how often files hold a version whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.manifest import Published
from paceline.core.version import Version
from paceline.runtime import registry
from paceline.testing.object_transport import InProcessObjects, ObjectCluster
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import shows


def published(make_spec: MakeSpec, settings: dict[str, object], step: float, count: int = 2) -> list[Published]:
    """`count` versions of a small model, each confirmed; every update adds `step` to one weight in a hundred."""
    weight = torch.ones(100_000)
    sender = registry.build_sender(make_spec(settings), 1, InProcessObjects(ObjectCluster(), "home"))
    made: list[Published] = []
    try:
        for n in range(count):
            base = made[-1].manifest.version if made else None
            sender.capture([("w", weight)], Version(1, n).packed, base)
            made.append(sender.publish())
            weight[:: 100 if step else 1] += step or 1.0
    finally:
        sender.close()
    return made


SPARSE, DENSE = 1e-4, 0.0


@pytest.mark.parametrize("backend", ["shared_memory", "ray_object", "filesystem"])
@shows("checkpoint_engine.mode")
def test_what_is_sent(make_spec: MakeSpec, tmp_path: Path, backend: str) -> None:
    def is_delta(mode: str, step: float) -> bool:
        url = str(tmp_path / f"{mode}-{step}")
        settings: dict[str, object] = {
            "checkpoint_engine.backend": backend,
            "checkpoint_engine.mode": mode,
            "checkpoint_engine.engine_kwargs.filesystem.url": url,
        }
        return published(make_spec, settings, step)[-1].manifest.delta is not None

    assert not is_delta("full", SPARSE)
    assert is_delta("delta", SPARSE)
    assert is_delta("auto", SPARSE) == (backend != "shared_memory")
    assert not is_delta("auto", DENSE)


@shows("checkpoint_engine.engine_kwargs.filesystem.full_every")
def test_files_hold_every_so_many_versions_whole(make_spec: MakeSpec, tmp_path: Path) -> None:
    def whole(full_every: int) -> list[int]:
        url = tmp_path / str(full_every)
        settings: dict[str, object] = {
            "checkpoint_engine.backend": "filesystem",
            "checkpoint_engine.engine_kwargs.filesystem.url": str(url),
            "checkpoint_engine.engine_kwargs.filesystem.full_every": full_every,
            "checkpoint_engine.engine_kwargs.filesystem.keep": 9,
        }
        published(make_spec, settings, SPARSE, count=7)
        return [n for n in range(7) if list((url / f"1.{n}").glob("*.safetensors"))]

    assert whole(1) == [0, 1, 2, 3, 4, 5, 6]
    assert whole(3) == [0, 3, 6]
