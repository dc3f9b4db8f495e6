"""From `data.*` to rows: which entry of `train_files` and `val_files` is what, and what validation has without any."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.sections.data import DataConfig
from paceline.dataset.gym_rows import PREFIX, VALIDATION_SEED, GymRows
from paceline.dataset.jsonl_rows import JsonlRows
from paceline.dataset.rows import Rows
from paceline.dataset.verl_row import columns

JSONL = (".jsonl", ".json")
PARQUET = (".parquet", ".pq")


def is_generated(entry: str) -> bool:
    """Whether an entry names a data set that makes its problems itself."""
    return entry.startswith(PREFIX)


def open_training(data: DataConfig, *, chat: bool, spill_dir: Path | None, at_most: int | None = None) -> list[Rows]:
    """The data sets of `data.train_files`. `chat`: problems that are made are posed as chats. `spill_dir`: see
    `ParquetRows`. `at_most` rows of each file are opened (None: all of them).

    Raises:
        ConfigError: a file is missing, empty or of an unknown kind, or a data set is not known.
    """
    return [
        GymRows(entry, prompt_key=data.prompt_key, chat=chat, seed=data.seed)
        if is_generated(entry)
        else open_file(Path(entry), data.prompt_key, limit=at_most, spill_dir=spill_dir)
        for entry in data.train_files
    ]


def open_validation(data: DataConfig, *, chat: bool, spill_dir: Path | None, at_most: int | None = None) -> list[Rows]:
    """The data sets of `data.val_files`; without any, problems that training never makes, where it makes its own.

    Raises:
        ConfigError: as `open_training`.
    """
    seed = data.seed + VALIDATION_SEED
    limit = at_most if data.val_max_samples == -1 else data.val_max_samples
    entries = data.val_files or [entry for entry in data.train_files if is_generated(entry)]
    return [
        FirstRows(GymRows(entry, prompt_key=data.prompt_key, chat=chat, seed=seed), data.val_size)
        if is_generated(entry)
        else open_file(Path(entry), data.prompt_key, limit=limit, spill_dir=spill_dir)
        for entry in entries
    ]


def open_file(path: Path, prompt_key: str, *, limit: int | None = None, spill_dir: Path | None = None) -> Rows:
    """The rows of a file, at most `limit` of them.

    Raises:
        ConfigError: it is missing, empty, cannot be read or is of an unknown kind.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if path.suffix in JSONL:
        rows = JsonlRows(path)
        return rows if limit is None else FirstRows(rows, limit)
    if path.suffix in PARQUET:
        from paceline.dataset.parquet_rows import ParquetRows  # loads Arrow, which JSONL does not need

        return ParquetRows(path, columns(prompt_key), spill_dir=spill_dir, limit=limit)
    raise ConfigError(f"{path}: is neither JSONL ({', '.join(JSONL)}) nor Parquet ({', '.join(PARQUET)})")


class FirstRows:
    """The first `count` rows of another data set."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows = rows
        self._count = min(count, len(rows))
        self.name = rows.name
        self.row = rows.row

    def __len__(self) -> int:
        return self._count
