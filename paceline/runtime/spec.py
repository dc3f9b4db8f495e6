"""RunSpec: all that a process of a run is told when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paceline.core.config import Config, build_config


class RunSpec(msgspec.Struct, frozen=True):
    """One run. Directories are absolute: `run_dir` is kept, `private_dir` holds sockets and goes with the run."""

    run_id: str
    life: int
    run_dir: str
    private_dir: str
    model_path: str
    threads: dict[str, int]
    config_tree: dict[str, Any]

    @property
    def config(self) -> Config:
        """The checked configuration."""
        return build_config(self.config_tree)

    @property
    def events_path(self) -> Path:
        """The run's one event log."""
        return Path(self.run_dir) / "events.jsonl"

    @property
    def serving_dir(self) -> Path:
        """Where replicas tell outside processes what they serve."""
        return Path(self.run_dir) / "serving"

    @property
    def replica_ids(self) -> list[str]:
        """Names of the replicas."""
        return [f"replica-{index}" for index in range(self.config.rollout.num_replicas)]


def encode_spec(spec: RunSpec) -> bytes:
    """Msgpack bytes, as they cross to a process of the run."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> RunSpec:
    """Inverse of `encode_spec`."""
    return msgspec.msgpack.decode(data, type=RunSpec)
