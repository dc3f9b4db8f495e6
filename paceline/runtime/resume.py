"""Which checkpoint a run goes on from, and what its parts get out of it.

`auto` looks at the run directories of the project and experiment, newest first: one that lives or is completed ends the
search (what came before it was left on purpose), one without a whole checkpoint is passed over, the first that has one
is continued in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.core.checkpoint import (
    FORMAT,
    META_FILE,
    ROLLOUTER_FILE,
    CheckpointMeta,
    decode_rollouter,
    sampling_settings,
)
from paceline.core.config import Config
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.events import RunFinished, RunResumed, RunStarted
from paceline.core.version import Lineage
from paceline.observability.reader import Record, read_events
from paceline.rollout.resumption import Resumption
from paceline.runtime.run_lock import RunLock, wait_for_processes
from paceline.runtime.spec import Resumed
from paceline.store.checkpoint_directory import newest_checkpoint, verify_checkpoint
from paceline.store.token_journal import read_journal

CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"


class ResumePoint(NamedTuple):
    """A whole checkpoint, the life before the new one, and the lives that went on from it and left no checkpoint."""

    run_dir: Path
    checkpoint: Path
    meta: CheckpointMeta
    last_life: int
    siblings: list[int]
    refused: list[str]

    def lineage(self, life: int) -> Lineage:
        """That of a life that goes on from here."""
        return self.meta.lineage_of(life, self.siblings)

    def resumed(self) -> Resumed:
        """For the processes of the new life."""
        event = RunResumed(
            from_life=self.meta.life,
            step=self.meta.step,
            version=self.meta.version,
            admitted=self.meta.admitted,
            restored=self.meta.open_ids,
            refused=self.refused,
        )
        return Resumed(str(self.checkpoint), self.meta.step, self.meta.updates_since_sync, event)


def find_resume_point(config: Config, lock: RunLock) -> ResumePoint | None:
    """What `trainer.resume_mode` says to go on from, None for a new run; its directory is locked for this driver then.

    Raises:
        ConfigError: the checkpoint that was named cannot be used, its run lives, or it was made under other settings.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None
    runs = Path(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
    named = trainer.resume_from_path
    point = _newest(runs, lock) if named is None else _named(Path(named).absolute(), lock)
    if point is not None:
        _check_settings(config, point)
    return point


def load_meta(checkpoint: Path) -> CheckpointMeta:
    """`meta.json` of a checkpoint.

    Raises:
        CheckpointError: it is none of this format.
    """
    try:
        meta = msgspec.json.decode((checkpoint / META_FILE).read_bytes(), type=CheckpointMeta)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{checkpoint.name}: {META_FILE}: {error}") from error
    if meta.format != FORMAT:
        raise CheckpointError(f"{checkpoint.name}: format {meta.format} is not {FORMAT}")
    return meta


def load_resumption(config: Config, checkpoint: Path, journal: Path, lineage: Lineage) -> Resumption:
    """The rollouter's part of a checkpoint, and what the token journals know beyond it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        snapshot = decode_rollouter((checkpoint / ROLLOUTER_FILE).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{checkpoint.name}: {ROLLOUTER_FILE}: {error}") from error
    goes_on = config.async_training.partial_rollout
    return Resumption(snapshot, lineage, read_journal(journal, list(lineage.ancestors)) if goes_on else None)


def _newest(runs: Path, lock: RunLock) -> ResumePoint | None:
    for run_dir in sorted(runs.glob("*/"), reverse=True):
        if not (run_dir / EVENTS).is_file():
            continue
        if not lock.take(run_dir):
            return None
        wait_for_processes(run_dir)
        records = read_events(run_dir / EVENTS)
        if any(isinstance(r.event, RunFinished) and r.event.outcome == "completed" for r in records):
            break
        checkpoint, refused = newest_checkpoint(run_dir / CHECKPOINTS)
        if checkpoint is not None:
            return _point(run_dir.absolute(), checkpoint.absolute(), records, refused)
    lock.release()
    return None


def _named(checkpoint: Path, lock: RunLock) -> ResumePoint:
    key = "trainer.resume_from_path"
    if not checkpoint.is_dir():
        raise ConfigError(f"{key}: there is no directory {checkpoint}")
    try:
        verify_checkpoint(checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error.message}") from error
    run_dir = checkpoint.parent.parent
    if not (run_dir / EVENTS).is_file():
        raise ConfigError(f"{key}: {checkpoint} is not in the directory of a run: there is no {run_dir / EVENTS}")
    if not lock.take(run_dir):
        raise ConfigError(f"{key}: the run in {run_dir} is still running")
    wait_for_processes(run_dir)
    return _point(run_dir, checkpoint, read_events(run_dir / EVENTS), [])


def _point(run_dir: Path, checkpoint: Path, records: Sequence[Record], refused: list[str]) -> ResumePoint:
    meta = load_meta(checkpoint)
    life = 0
    siblings: list[int] = []
    for record in records:
        if isinstance(record.event, RunStarted):
            life = record.event.life
        elif isinstance(record.event, RunResumed) and _goes_on_from(record.event, meta):
            siblings.append(life)
    return ResumePoint(run_dir, checkpoint, meta, life, siblings, refused)


def _goes_on_from(event: RunResumed, meta: CheckpointMeta) -> bool:
    return (event.from_life, event.step) == (meta.life, meta.step)


def _check_settings(config: Config, point: ResumePoint) -> None:
    now = msgspec.to_builtins(sampling_settings(config))
    for key, then in point.meta.sampling.items():
        if now.get(key) != then:
            raise ConfigError(
                f"{key}={now.get(key)}, but the run in {point.run_dir} was saved with {key}={then}; set it so to go on "
                "with it, or trainer.resume_mode=disable to begin a new run"
            )
