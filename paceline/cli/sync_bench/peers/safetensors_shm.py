"""A safetensors file in /dev/shm: the trainer writes it, every replica loads it and copies it into its parameters.

The file is mapped when it is loaded, so its bytes are copied once per replica. The one before is removed first: there
is room for one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.weights import check_marks, make_weights, mark


class SafetensorsShm:
    """Implements `peer_process.PeerSide`; `setup.directory` lies in /dev/shm."""

    def __init__(self, setup: SetUp, shapes: ModelShapes) -> None:
        self._name, self._rank = setup.name, setup.rank
        self._directory = Path(setup.directory)
        self._weights = make_weights(shapes, seed=setup.rank)

    def sync(self, version: int) -> float:
        """Save, or load and copy."""
        path = self._directory / f"weights-{version}.safetensors"
        if self._rank == 0:
            mark(self._weights, version)
            for older in self._directory.glob("*.safetensors"):
                older.unlink()
            save_file(self._weights, path)
            return 0.0
        with torch.no_grad():
            for name, tensor in load_file(path).items():
                self._weights[name].copy_(tensor)
        return 0.0

    def check(self, version: int) -> None:
        """See `PeerSide`."""
        check_marks(self._weights, version, self._name)

    def close(self) -> None:
        """The directory goes with the benchmark."""


def build(setup: SetUp, shapes: ModelShapes) -> SafetensorsShm:
    """One side."""
    return SafetensorsShm(setup, shapes)
