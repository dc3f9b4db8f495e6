"""Ray's object store at its best: numpy arrays put once, got without a copy, copied into the parameters.

Ray keeps the arrays' bytes outside the pickle, so a reader's arrays lie in the store itself. bfloat16 travels as int16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.peers.peer_process import PeerSide
from paceline.runtime.ray_environment import prepare_environment


class NumpyForm:
    """Implements `ray_cluster.ObjectForm`."""

    def pack(self, weights: dict[str, torch.Tensor]) -> Any:
        """Views; nothing is copied here."""
        return {name: tensor.view(torch.int16).numpy() for name, tensor in weights.items()}

    def unpack(self, packed: Any, weights: dict[str, torch.Tensor]) -> None:
        """From the store into the parameters."""
        for name, array in packed.items():
            weights[name].view(torch.int16).numpy()[...] = array


FORM = NumpyForm()


def build(setup: SetUp, shapes: ModelShapes) -> PeerSide:
    """Trainer and replicas."""
    prepare_environment(Path(setup.directory))  # before ray is imported, which reads it once
    from paceline.cli.sync_bench.peers.ray_cluster import RayCluster

    return RayCluster(setup, shapes, __name__)
