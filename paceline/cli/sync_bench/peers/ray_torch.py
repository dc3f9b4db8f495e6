"""Ray's object store as most people use it: a torch state dict is put, got, and loaded into the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.peers.peer_process import PeerSide
from paceline.runtime.ray_environment import prepare_environment


class TorchForm:
    """Implements `ray_cluster.ObjectForm`."""

    def pack(self, weights: dict[str, torch.Tensor]) -> Any:
        """The state dict as it is."""
        return weights

    def unpack(self, packed: Any, weights: dict[str, torch.Tensor]) -> None:
        """As `load_state_dict` does."""
        with torch.no_grad():
            for name, tensor in packed.items():
                weights[name].copy_(tensor)


FORM = TorchForm()


def build(setup: SetUp, shapes: ModelShapes) -> PeerSide:
    """Trainer and replicas."""
    prepare_environment(Path(setup.directory))  # before ray is imported, which reads it once
    from paceline.cli.sync_bench.peers.ray_cluster import RayCluster

    return RayCluster(setup, shapes, __name__)
