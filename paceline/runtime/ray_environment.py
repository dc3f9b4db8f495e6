"""Environment variables that Ray reads once, when it is imported; its processes inherit them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.runtime.process_tree import TOKEN_VARIABLE

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # Ray counts no GPUs here and would hide them all
    "OMP_NUM_THREADS": "1",  # each part sets its own threads from the thread plan
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare_environment(private_dir: Path) -> None:
    """Set them for this process and all that it starts; a fresh token keeps other users out of the run's Ray.

    What libraries cache on disk goes to `private_dir`, which ends with the run.
    """
    prepare_joining(private_dir)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def prepare_joining(private_dir: Path) -> None:
    """The same for a run that joins a running cluster: how that one tells its users apart is left as it is."""
    os.environ.update(_of_the_run(private_dir))


def variables_of_workers(private_dir: Path) -> dict[str, str]:
    """What the run's processes need that a cluster starts, which does not inherit this process's environment."""
    token = os.environ.get(TOKEN_VARIABLE)
    mark = {} if token is None else {TOKEN_VARIABLE: token}  # the process guard knows them by it
    return {**_of_the_run(private_dir), **mark}


def _of_the_run(private_dir: Path) -> dict[str, str]:
    return {**QUIET, "TORCHINDUCTOR_CACHE_DIR": str(private_dir / "torchinductor")}
