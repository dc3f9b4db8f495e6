"""RunSpec: all that a process of a run is told when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paceline.core.config import Config, build_config
from paceline.core.events import RunResumed
from paceline.core.ports import VALIDATOR
from paceline.core.version import Lineage


class Resumed(msgspec.Struct, frozen=True):
    """What a run goes on from: a verified checkpoint (its directory), and the event that says so."""

    checkpoint: str
    step: int
    updates_since_sync: int
    event: RunResumed


class RunSpec(msgspec.Struct, frozen=True):
    """One life of a run. Directories are absolute: `run_dir` is kept, `private_dir` holds sockets and goes with the
    life. `lineage` None is that of a first life; `resumed` None: it begins anew.
    """

    run_id: str
    life: int
    run_dir: str
    private_dir: str
    model_path: str
    threads: dict[str, int]
    config_tree: dict[str, Any]
    lineage: Lineage | None = None
    resumed: Resumed | None = None

    @property
    def config(self) -> Config:
        """The checked configuration."""
        return build_config(self.config_tree)

    @property
    def descent(self) -> Lineage:
        """The lineage of this life."""
        return self.lineage or Lineage(self.life)

    @property
    def checkpoints_dir(self) -> Path:
        """Where the run's checkpoints are."""
        return Path(self.run_dir) / "checkpoints"

    @property
    def journal_dir(self) -> Path:
        """Where its token journals are."""
        return Path(self.run_dir) / "journal"

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

    @property
    def validator_ids(self) -> list[str]:
        """Names of the processes of the trainer's side of validations: one, or none."""
        return [VALIDATOR] if self.config.async_training.use_trainer_do_validate else []


def encode_spec(spec: RunSpec) -> bytes:
    """Msgpack bytes, as they cross to a process of the run."""
    return msgspec.msgpack.encode(spec)


def decode_spec(data: bytes) -> RunSpec:
    """Inverse of `encode_spec`."""
    return msgspec.msgpack.decode(data, type=RunSpec)
