"""The refusal of a run whose weights do not fit into memory."""

from __future__ import annotations

from pathlib import Path

from paceline.core.config import Config
from paceline.runtime.model_files import weight_bytes
from paceline.store.capacity import check_memory


def check_arenas(config: Config, directory: Path) -> None:
    """Refuse a run whose weight arenas do not fit into memory.

    Raises:
        CapacityError: with the bytes needed and the bytes free.
    """
    each = weight_bytes(config, directory)
    copies = config.weight_copies
    check_memory(copies * each, f"{copies} weight arenas of {each} bytes")
