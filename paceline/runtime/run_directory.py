"""The run directory: everything that a run leaves, below `trainer.default_local_dir`.

`config.yaml` (resolved), `events.jsonl`, `summary.json`, `rollouts/`, `tensorboard/`, `model/`, and while it runs
`serving/`.
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
from paceline.core.threads import plan_threads
from paceline.observability.reader import read_events
from paceline.observability.summary import encode_summary, fold_summary
from paceline.runtime.process_tree import TEMP_DIR_PREFIX
from paceline.runtime.registry import model_path
from paceline.runtime.spec import RunSpec

FIRST_LIFE = 1


def create_run(config: Config) -> RunSpec:
    """Make a new run directory and a private directory for sockets, and write `config.yaml`.

    Raises:
        ConfigError: the directory cannot be made.
    """
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir).absolute() / trainer.project_name / trainer.experiment_name / run_id
    try:
        for part in ("serving", "rollouts"):
            (run_dir / part).mkdir(parents=True)
        tree = config.model_dump(mode="json")
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(tree)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir: cannot make {run_dir}: {error.strerror}") from error
    return RunSpec(
        run_id=run_id,
        life=FIRST_LIFE,
        run_dir=str(run_dir),
        private_dir=tempfile.mkdtemp(prefix=TEMP_DIR_PREFIX),
        model_path=str(model_path(config)),
        threads=plan_threads(len(os.sched_getaffinity(0)), config.rollout.num_replicas),
        config_tree=tree,
    )


def close_run(spec: RunSpec) -> Mapping[str, Any]:
    """Fold the event log into `summary.json` and remove what only lived with the run; returns the summary."""
    shutil.rmtree(spec.serving_dir, ignore_errors=True)
    summary = fold_summary(read_events(spec.events_path))
    (Path(spec.run_dir) / "summary.json").write_bytes(encode_summary(summary))
    return summary
