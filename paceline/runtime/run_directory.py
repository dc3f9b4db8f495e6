"""The run directory: everything that a run leaves, below `trainer.default_local_dir`.

`config.yaml` (resolved), `events.jsonl`, `summary.json`, `rollouts/`, `tensorboard/`, `model/`, `checkpoints/`,
`journal/`, and while it runs `serving/`. A run that is resumed goes on in its directory.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from paceline.core.config import Config
from paceline.core.errors import ConfigError
from paceline.core.ports import VALIDATOR
from paceline.core.threads import plan_threads
from paceline.observability.reader import read_events
from paceline.observability.summary import encode_summary, fold_summary
from paceline.runtime.process_tree import TEMP_DIR_PREFIX
from paceline.runtime.registry import model_path, next_life
from paceline.runtime.resume import CHECKPOINTS, EVENTS, find_resume_point
from paceline.runtime.run_lock import RunLock
from paceline.runtime.spec import RunSpec
from paceline.store.checkpoint_directory import clear_left_overs


def create_run(config: Config, lock: RunLock | None = None) -> RunSpec:
    """Make a new run directory, or take the one that `trainer.resume_mode` goes on with, and a private directory for
    sockets; write `config.yaml`. The run directory is this driver's as long as `lock` is held (None: as it lives).

    Raises:
        ConfigError: the directory cannot be made, what it is to go on from cannot be used, or the place where the run
            publishes weights cannot be used.
    """
    lock = lock or RunLock()
    point = find_resume_point(config, lock)
    life = next_life(config)
    tree = config.model_dump(mode="json")
    if point is None:
        run_dir = _new_directory(config)
        lock.take(run_dir)
        lineage = None
    else:
        run_dir = point.run_dir
        life = max(life, point.last_life + 1)
        lineage = point.lineage(life)
        _mend(run_dir)
    try:
        for part in ("serving", "rollouts"):
            (run_dir / part).mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(tree)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir: cannot write to {run_dir}: {error.strerror}") from error
    return RunSpec(
        run_id=run_dir.name,
        life=life,
        run_dir=str(run_dir),
        private_dir=tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX),
        model_path=str(model_path(config)),
        threads=plan_threads(
            len(os.sched_getaffinity(0)),
            config.rollout.num_replicas,
            [VALIDATOR] if config.async_training.use_trainer_do_validate else [],
        ),
        config_tree=tree,
        lineage=lineage,
        resumed=None if point is None else point.resumed(),
    )


def _new_directory(config: Config) -> Path:
    trainer = config.trainer
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run_dir = Path(trainer.default_local_dir).absolute() / trainer.project_name / trainer.experiment_name / run_id
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir: cannot make {run_dir}: {error.strerror}") from error
    return run_dir


def _mend(run_dir: Path) -> None:
    """Clear what a life that was killed has left: half a checkpoint, half a line, what its replicas served."""
    clear_left_overs(run_dir / CHECKPOINTS)
    shutil.rmtree(run_dir / "serving", ignore_errors=True)
    for path in (run_dir / EVENTS, *(run_dir / "rollouts").glob("*.jsonl")):
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) == 0:
                continue
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def close_run(spec: RunSpec) -> Mapping[str, Any]:
    """Fold the event log into `summary.json` and remove what only lived with the run; returns the summary."""
    shutil.rmtree(spec.serving_dir, ignore_errors=True)
    summary = fold_summary(read_events(spec.events_path))
    (Path(spec.run_dir) / "summary.json").write_bytes(encode_summary(summary))
    return summary
