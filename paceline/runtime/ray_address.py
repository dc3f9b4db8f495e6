"""Which running Ray cluster `ray.address` means, and whether it answers; known before anything is started."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import ConfigError

ANSWER_SECONDS = 5.0
# Where `ray start` leaves the address of the cluster that it has started on this machine.
CURRENT_CLUSTER = "ray/ray_current_cluster"


def cluster_address(config: Config) -> str | None:
    """host:port of the cluster to join, None for a Ray of the run's own.

    Raises:
        ConfigError: no cluster is known for `auto`, or nothing answers at the address.
    """
    wanted = config.ray.address
    if wanted is None:
        return None
    address = _current() if wanted == "auto" else wanted
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS):
            return address
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"ray.address={wanted}: no Ray cluster answers at {address} ({reason}); start one with ray start --head, "
            "or leave the key out for a Ray of the run's own"
        ) from error


def _current() -> str:
    """What Ray itself takes for "auto"."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    try:
        return (root / CURRENT_CLUSTER).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            "ray.address=auto: no Ray cluster runs on this machine; start one with ray start --head, or give host:port"
        ) from error
