"""Rows in verl's schema, and files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def sum_row(index: int, **changed: Any) -> dict[str, Any]:
    """The sum of `index` and 1, as a text; `changed` fields are replaced, None takes one out."""
    row = {
        "prompt": f"{index}+1=",
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
        **changed,
    }
    return {name: value for name, value in row.items() if value is not None}


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], row_group_size: int | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path
