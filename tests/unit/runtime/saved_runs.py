"""Run directories with checkpoints in them, without a run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.core.checkpoint import (
    FORMAT,
    META_FILE,
    ROLLOUTER_FILE,
    CheckpointMeta,
    RollouterSnapshot,
    encode_rollouter,
    sampling_settings,
)
from paceline.core.events import RunStarted
from paceline.core.version import Version
from paceline.observability.event_log import EventLog
from paceline.runtime.spec import RunSpec
from paceline.store.checkpoint_directory import CheckpointDirectory


def save_run(spec: RunSpec, *, steps: list[int], updates_since_sync: int = 0) -> RunSpec:
    """What a life of this run leaves when it is killed: its start in the log, a checkpoint at each of these updates."""
    log = EventLog(spec.events_path, "driver", lambda: 0.0)
    log.emit(
        RunStarted(run_id=spec.run_id, life=spec.life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=9)
    )
    log.close()
    store = CheckpointDirectory(spec.checkpoints_dir, life=spec.life, keep=9, journal=spec.journal_dir)
    for step in steps:
        store.save(step, _write, _parts(spec, step, updates_since_sync))
    return spec


def _write(directory: str) -> bool:
    (Path(directory) / "trainer.safetensors").write_bytes(b"weights")
    return True


def _parts(spec: RunSpec, step: int, updates_since_sync: int) -> dict[str, bytes]:
    snapshot = RollouterSnapshot(
        life=spec.life,
        admitted=8 * step,
        failed=0,
        dropped=0,
        prompts=b"",
        groups=[],
        ready=[],
        admitted_under={},
    )
    meta = CheckpointMeta(
        format=FORMAT,
        run_id=spec.run_id,
        life=spec.life,
        step=step,
        version=Version(spec.life, step // 2).packed,
        updates_since_sync=updates_since_sync,
        lineage=spec.descent,
        admitted=8 * step,
        failed=0,
        dropped=0,
        open_ids=[],
        sampling=sampling_settings(spec.config),
    )
    return {ROLLOUTER_FILE: encode_rollouter(snapshot), META_FILE: msgspec.json.encode(meta)}
