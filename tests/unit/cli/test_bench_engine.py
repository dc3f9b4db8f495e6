"""`paceline bench engine` measures the same work on both sides and writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.cli import bench_engine


def test_rows_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_engine, "LONGEST", 4)
    threads = torch.get_num_threads()
    file = tmp_path / "engine.json"
    assert bench_engine.run(json_path=file, threads=(1, 4096), rounds=1) == 0
    assert torch.get_num_threads() == threads
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["scenario"], row["threads"], row["requests"]) for row in rows] == [
        ("equal", 1, 64),
        ("long tail", 1, 256),
    ]
    for row in rows:
        assert row["equal_responses"] == 1.0
        mine, theirs = row["engine_tokens_per_second"], row["generate_tokens_per_second"]  # both rounded, as the ratio
        assert (mine - 0.05) / (theirs + 0.05) - 0.0005 <= row["ratio"] <= (mine + 0.05) / (theirs - 0.05) + 0.0005
    printed = capsys.readouterr().out
    assert "long tail" in printed
    assert "4096 threads: left out" in printed


def test_the_long_tail_has_one() -> None:
    equal, tail = bench_engine.workloads(99)
    assert set(equal.lengths) == {bench_engine.LONGEST}
    mean = sum(tail.lengths) / len(tail.lengths)
    assert max(tail.lengths) > 3 * mean
    assert min(tail.lengths) >= 1
    assert all(0 <= token < 99 for workload in (equal, tail) for prompt in workload.prompts for token in prompt)
