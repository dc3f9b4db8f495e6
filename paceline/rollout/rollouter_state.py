"""The rollouter's part of a checkpoint: one JSON file, whole or not there."""

from __future__ import annotations

from pathlib import Path

import msgspec

FILE_NAME = "rollouter.json"


class RollouterState(msgspec.Struct, frozen=True):
    """Where the rollouter stands. `prompts` is the state of its prompt source."""

    life: int
    admitted: int
    failed: int
    prompts: msgspec.Struct


def save_state(state: RollouterState, directory: Path) -> None:
    """Write the state; a reader sees the old file or the new one, never half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{FILE_NAME}.tmp"
    unfinished.write_bytes(msgspec.json.encode(state))
    unfinished.replace(directory / FILE_NAME)
