"""Rows of JSONL and Parquet files: found, named, and not loaded before they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.core.errors import ConfigError
from paceline.dataset.jsonl_rows import JsonlRows
from paceline.dataset.opening import open_file
from paceline.dataset.parquet_rows import ROWS_AT_ONCE, ParquetRows
from paceline.dataset.rows import Rows
from paceline.dataset.verl_row import columns
from tests.unit.dataset.files import sum_row, write_jsonl, write_parquet

ROWS = [sum_row(index, prompt=[{"role": "user", "content": f"{index}+1?"}]) for index in range(7)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_come_as_they_were_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    else:
        write_parquet(path, ROWS)
    rows: Rows = open_file(path, "prompt")
    assert len(rows) == 7
    assert [rows.row(place) for place in range(7)] == ROWS
    assert rows.name(3) == f"{path}:4" if kind == "jsonl" else f"{path}:row 3"
    first = open_file(path, "prompt", limit=2)
    assert [first.row(place) for place in range(len(first))] == ROWS[:2]
    assert first.name(1) == rows.name(1)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n\r\n\n{"a": "\xc3\xa4"}\n[1]\n{"a": \n{"a": 2}')
    rows = JsonlRows(path)
    assert len(rows) == 5
    assert [rows.row(place) for place in (0, 1, 4)] == [{"a": 1}, {"a": "ä"}, {"a": 2}]
    assert [rows.name(place).rpartition(":")[2] for place in range(5)] == ["2", "5", "6", "7", "8"]
    with pytest.raises(ValueError, match="is list, not a JSON object"):
        rows.row(2)
    with pytest.raises(ValueError, match="is no JSON"):
        rows.row(3)


@pytest.mark.parametrize("row_group_size", [1000, ROWS_AT_ONCE, 100_000])
def test_parquet_rows_are_found_in_any_division_into_groups(tmp_path: Path, row_group_size: int) -> None:
    count = 2 * ROWS_AT_ONCE + 17
    path = write_parquet(tmp_path / "rows.parquet", [sum_row(index) for index in range(count)], row_group_size)
    rows = ParquetRows(path, columns("prompt"))
    assert len(rows) == count
    for place in (0, 1, 999, 1000, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, count - 1):
        assert rows.row(place) == sum_row(place)


def test_columns_that_no_prompt_needs_are_not_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [sum_row(0, picture="x" * 1000)])
    assert set(ParquetRows(path, columns("prompt")).row(0)) == {"prompt", "data_source", "reward_model", "extra_info"}


def test_an_unpacked_file_has_no_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [sum_row(0)])
    rows = ParquetRows(path, columns("prompt"), spill_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert rows.row(0) == sum_row(0)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("nowhere.jsonl", None, "nowhere.jsonl: there is no such file"),
        ("empty.jsonl", b"", "empty.jsonl: has no rows"),
        ("blank.jsonl", b"\n\n", "blank.jsonl: has no rows"),
        ("rows.csv", b"a,b\n", "rows.csv: is neither JSONL"),
        ("broken.parquet", b"PAR1 no", "broken.parquet: cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_file(tmp_path / name, "prompt")
    assert line in caught.value.message
    assert "\n" not in caught.value.message


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: has no rows"):
        open_file(tmp_path / "rows.parquet", "prompt")


# What is in use, and not what allocators keep for later: that grows with the number of threads.
MEASURE = """
import ctypes, sys
from pathlib import Path
from paceline.dataset.opening import open_file
def held():
    ctypes.CDLL(None).malloc_trim(0)
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
open_file(Path(sys.argv[2]), "prompt").row(0)
before = held()
rows = open_file(Path(sys.argv[1]), "prompt")
rows.row(len(rows) - 1)
print(len(rows), held() - before)
"""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("count", "length"), [(300_000, 500), (2_000_000, 100)], ids=["long", "many"])
def test_opening_a_large_file_loads_no_rows(tmp_path: Path, kind: str, count: int, length: int) -> None:
    """300,000 rows of 600 bytes, 2,000,000 of 200: as objects they would take far more than their 180 and 400 MB."""
    text = "x" * length
    large, small = tmp_path / f"large.{kind}", tmp_path / f"small.{kind}"
    if kind == "jsonl":
        line = '{"prompt": "' + text + '", "data_source": "d", "reward_model": {"ground_truth": "1"}}\n'
        large.write_text(line * count, encoding="utf-8")
        write_jsonl(small, [sum_row(0)])
    else:
        piece = pa.table({"prompt": [f"{i}{text}" for i in range(10_000)], "data_source": ["d"] * 10_000})
        with pq.ParquetWriter(large, piece.schema, compression="zstd") as writer:
            for _ in range(count // 10_000):
                writer.write_table(piece)
        write_parquet(small, [sum_row(0)])
    command = [sys.executable, "-c", MEASURE, str(large), str(small)]
    environ = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == count
    assert kilobytes < 32_000
