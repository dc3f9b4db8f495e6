"""The rollouter's part of a checkpoint as a file: whole or not there."""

from __future__ import annotations

from pathlib import Path

from paceline.core.checkpoint import ROLLOUTER_FILE


def save_part(encoded: bytes, directory: Path) -> None:
    """Write an encoded snapshot; a reader sees the old file or the new one, never half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{ROLLOUTER_FILE}.tmp"
    unfinished.write_bytes(encoded)
    unfinished.replace(directory / ROLLOUTER_FILE)
