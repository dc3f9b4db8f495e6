"""Which node of a cluster each replica runs on, and what each node's object store has to hold.

All other parts run on the home node, where the run was started; so does the writer of the weights. Replicas are spread
over `rollout.nnodes` nodes: others than the home node where the cluster has them and the checkpoint engine reaches
them, else the home node itself. What cannot work is refused here, before any part starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import CapacityError, ConfigError

MARGIN_BYTES = 128 * 1024 * 1024  # for samples and commands
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Node:
    """A living node: its id and name in Ray, and the size of its object store."""

    node_id: str
    name: str
    store_bytes: int

    def __str__(self) -> str:
        return f"node {self.name} ({self.node_id[:12]})"


def store_bytes(config: Config, weight_bytes: int) -> int:
    """What a node's object store has to hold; `weight_bytes` is the size of one version."""
    weights = config.arenas * weight_bytes if config.checkpoint_engine.backend == "ray_object" else 0
    return weights + MARGIN_BYTES


def check_local_store(config: Config, weight_bytes: int, shared_memory: Path = SHARED_MEMORY) -> None:
    """Refuse a run on a Ray of its own, of one node, that cannot work.

    Raises:
        ConfigError: more nodes are asked for.
        CapacityError: the object store does not fit into `shared_memory`, where Ray keeps it.
    """
    if config.rollout.nnodes > 1:
        raise ConfigError(
            f"rollout.nnodes={config.rollout.nnodes}: the run starts a Ray of its own, which has one node"
        )
    needed = store_bytes(config, weight_bytes)
    free = shutil.disk_usage(shared_memory).free
    if config.checkpoint_engine.backend == "ray_object" and needed > free:
        raise CapacityError(
            f"checkpoint_engine.backend=ray_object: an object store for {config.arenas} versions of {weight_bytes} "
            f"bytes needs {needed} bytes, but {free} bytes are free in {shared_memory}"
        )


def place_replicas(
    config: Config, replica_ids: Sequence[str], nodes: Sequence[Node], home_id: str, needed_bytes: int
) -> dict[str, Node]:
    """The node of each replica. `needed_bytes` is `store_bytes`.

    Raises:
        ConfigError: the cluster has too few nodes.
        CapacityError: the object store of a node that would be used is too small.
    """
    home = next(node for node in nodes if node.node_id == home_id)
    chosen = _rollout_nodes(config, [node for node in nodes if node.node_id != home_id], home)
    for node in {home.node_id: home, **{node.node_id: node for node in chosen}}.values():
        if config.checkpoint_engine.backend == "ray_object" and needed_bytes > node.store_bytes:
            raise CapacityError(
                f"checkpoint_engine.backend=ray_object needs {needed_bytes} bytes of object store on {node}, "
                f"but it has {node.store_bytes} bytes"
            )
    return {replica_id: chosen[index % len(chosen)] for index, replica_id in enumerate(replica_ids)}


def _rollout_nodes(config: Config, others: Sequence[Node], home: Node) -> list[Node]:
    wanted = config.rollout.nnodes
    if config.checkpoint_engine.backend == "shared_memory" or (wanted == 1 and not others):
        return [home]
    if len(others) < wanted:
        raise ConfigError(f"rollout.nnodes={wanted}: the cluster has {len(others)} nodes beside that of the trainer")
    return sorted(others, key=lambda node: (node.name, node.node_id))[:wanted]
