"""Environment variables that Ray reads once, when it is imported; its processes inherit them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

QUIET_AND_PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_event_stats": "0",
    "RAY_enable_timeline": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",  # each part sets its own threads from the thread plan
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare_environment(private_dir: Path) -> None:
    """Set them for this process and all that it starts; a fresh token keeps other users out of the run's Ray.

    What libraries cache on disk goes to `private_dir`, which ends with the run.
    """
    os.environ.update(QUIET_AND_PRIVATE)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_dir / "torchinductor")
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
