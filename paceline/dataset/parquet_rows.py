"""Rows of a Parquet file, in memory that the system may take back: a memory-mapped Arrow file without a name.

Parquet has to be decoded in long runs; a shuffled order asks for single rows. So the columns that are needed are
decoded once, piece by piece, into an Arrow file whose rows lie where a map finds them at once. It is unlinked at birth:
nothing is left of it when the process ends. Memory that cannot be taken back stays flat, whatever the file's size.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.core.errors import ConfigError

ROWS_AT_ONCE = 4096


class ParquetRows:
    """Implements `Rows`; rows are counted from 0, as data frames do.

    `columns` are read where the file has them. `spill_dir` is where the unnamed Arrow file lives (None: the system's
    directory for temporary files). `limit` bounds the rows (None: all of them).

    Raises:
        ConfigError: the file cannot be read, or has no row.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], *, spill_dir: Path | None = None, limit: int | None = None
    ) -> None:
        self._path = path
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                rows: int = file.metadata.num_rows
                self._length = rows if limit is None else min(limit, rows)
                known = [name for name in columns if name in file.schema_arrow.names]
                self._reader = _spilled(file, known, self._length, spill_dir)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
        if not self._length:
            raise ConfigError(f"{path}: has no rows")

    def __len__(self) -> int:
        return self._length

    def name(self, place: int) -> str:
        """File and row."""
        return f"{self._path}:row {place}"

    def row(self, place: int) -> Mapping[str, Any]:
        """The row. Raises ValueError: its text is no UTF-8."""
        batch = self._reader.get_batch(place // ROWS_AT_ONCE)
        row: Mapping[str, Any] = batch.slice(place % ROWS_AT_ONCE, 1).to_pylist()[0]
        return row


def _spilled(file: Any, columns: Sequence[str], length: int, spill_dir: Path | None) -> Any:
    """A reader of an Arrow file that holds these columns in batches of `ROWS_AT_ONCE`, the last one shorter."""
    with tempfile.TemporaryFile(dir=spill_dir) as spill:
        schema = pa.schema([file.schema_arrow.field(name) for name in columns])
        left = length
        with pa.ipc.new_file(spill, schema) as writer:
            for batch in _even(file.iter_batches(batch_size=ROWS_AT_ONCE, columns=list(columns))):
                if left <= 0:
                    break
                writer.write_batch(batch.slice(0, left).replace_schema_metadata(None).cast(schema))
                left -= batch.num_rows
        spill.flush()
        held = mmap.mmap(spill.fileno(), os.fstat(spill.fileno()).st_size, access=mmap.ACCESS_READ)
    return pa.ipc.open_file(pa.py_buffer(held))


def _even(batches: Any) -> Any:
    """The same rows in batches of exactly `ROWS_AT_ONCE`: a reader may end one early at a row group's end."""
    held: list[Any] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        while count >= ROWS_AT_ONCE:
            table = pa.Table.from_batches(held).combine_chunks()
            yield table.slice(0, ROWS_AT_ONCE).to_batches()[0]
            count -= ROWS_AT_ONCE
            held = table.slice(ROWS_AT_ONCE).to_batches()
    if count:
        yield pa.Table.from_batches(held).combine_chunks().to_batches()[0]
