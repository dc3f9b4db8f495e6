"""Where replicas go in a cluster, and the refusals before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import Config, build_config
from paceline.core.errors import CapacityError, ConfigError
from paceline.runtime.placement import MARGIN_BYTES, Node, check_local_store, place_replicas, store_bytes

HOME, B, C = (Node(letter * 56, name, 1000) for letter, name in (("a", "zero"), ("b", "beta"), ("c", "alpha")))
REPLICAS = ["replica-0", "replica-1", "replica-2"]


def config(backend: str, **rollout: Any) -> Config:
    tree: dict[str, Any] = {"backend": backend, "engine_kwargs": {"filesystem": {"url": "/weights"}}}
    return build_config({"checkpoint_engine": tree, "rollout": {"num_replicas": 3, **rollout}})


def place(made: Config, *nodes: Node, needed: int = 1000) -> list[Node]:
    return list(place_replicas(made, REPLICAS, nodes, HOME.node_id, needed).values())


@pytest.mark.parametrize("backend", ["shared_memory", "ray_object", "filesystem"])
def test_one_node_has_everything(backend: str) -> None:
    assert place(config(backend), HOME) == [HOME] * 3


@pytest.mark.parametrize("backend", ["ray_object", "filesystem"])
def test_replicas_go_to_other_nodes_in_turn(backend: str) -> None:
    assert place(config(backend), HOME, B, C) == [C] * 3
    assert place(config(backend, nnodes=2), HOME, B, C) == [C, B, C]


def test_shared_memory_stays_at_home() -> None:
    assert place(config("shared_memory"), B, HOME, C) == [HOME] * 3


def test_shared_memory_on_several_nodes_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"shared_memory serves the trainer's node alone: rollout\.nnodes=2"):
        config("shared_memory", nnodes=2)


def test_more_nodes_than_replicas_or_than_there_are_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"rollout.nnodes=4 is more than rollout.num_replicas=3"):
        config("ray_object", nnodes=4)
    with pytest.raises(ConfigError, match=r"rollout\.nnodes=2: the cluster has 1 nodes beside that of the trainer"):
        place(config("ray_object", nnodes=2), HOME, B)
    with pytest.raises(ConfigError, match="a Ray of its own, which has one node"):
        check_local_store(config("filesystem", nnodes=2), 1)


def test_a_small_store_on_a_node_that_is_used_is_refused_by_its_name() -> None:
    small = Node("d" * 56, "aardvark", 999)
    with pytest.raises(CapacityError, match=r"needs 1000 bytes .* on node aardvark \(dddddddddddd\), .* 999 bytes"):
        place(config("ray_object"), HOME, small)
    assert place(config("filesystem"), HOME, small) == [small] * 3
    with pytest.raises(CapacityError, match="on node zero"):
        place(config("ray_object"), HOME, B, needed=1001)


def test_the_store_holds_all_versions_that_can_exist_and_a_margin() -> None:
    assert store_bytes(config("ray_object", max_pinned_versions=2), 100) == 400 + MARGIN_BYTES
    assert store_bytes(config("shared_memory"), 100) == MARGIN_BYTES


def test_shared_memory_of_the_machine_too_small_for_the_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"an object store for 3 versions of \d+ bytes needs \d+ bytes, but \d+ bytes"
    ):
        check_local_store(config("ray_object"), 1 << 60, tmp_path)
    check_local_store(config("ray_object"), 0, tmp_path)
    check_local_store(config("shared_memory"), 1 << 60, tmp_path)
