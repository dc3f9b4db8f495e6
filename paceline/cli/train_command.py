"""`paceline train`: check everything that needs no process, then run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli.config_files import load_config
from paceline.cli.model_files import check_arenas
from paceline.runtime.registry import model_path


def train(file: Path | None, overrides: Sequence[str], command_wall: float) -> int:
    """Train as configured and return the exit code. `command_wall` is when the command began, in unix seconds.

    Raises:
        ConfigError: refused, before anything has been started.
        PacelineError: the run failed or was interrupted.
    """
    config = load_config(file, overrides)
    check_arenas(config, model_path(config))
    # Loads Ray and takes a while: only for a run that may begin.
    from paceline.runtime.task_runner import run_training

    return run_training(config, command_wall=command_wall)
