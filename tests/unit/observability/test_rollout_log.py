"""Rollout records: one line per sample in the file of its version, nothing lost of a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.sample import Prompt, Response, Sample
from paceline.core.version import Version
from paceline.observability import rollout_log
from paceline.observability.rollout_log import JsonlRolloutLog, encode_versions

V7, V8 = Version(1, 7).packed, Version(1, 8).packed


def sample(sample_id: str) -> Sample:
    prompt = Prompt("p1", "47+85=", (4, 7, 11), "132", "arithmetic")
    logprobs = [-0.1, -0.25, -1.5, -0.0625]
    response = Response([1, 3, 2, 0], logprobs, [V7, V7, V8, V8], "stop", "132", 1.0, {"format": 0.5})
    return Sample(sample_id, 1, prompt, [response, Response([9], [-2.0], [V8], "length", "ä", 0.0)])


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_all_of_a_sample(tmp_path: Path) -> None:
    log = JsonlRolloutLog(tmp_path / "rollouts")
    log.record(sample("s1"), V8, "trained")
    log.flush()
    assert lines_of(tmp_path / "rollouts" / "8.jsonl") == [
        {
            "sample_id": "s1",
            "life": 1,
            "version": "1.8",
            "fate": "trained",
            "prompt_id": "p1",
            "prompt": "47+85=",
            "ground_truth": "132",
            "data_source": "arithmetic",
            "responses": [
                {
                    "text": "132",
                    "reward": 1.0,
                    "finish_reason": "stop",
                    "token_ids": [1, 3, 2, 0],
                    "logprobs": [-0.1, -0.25, -1.5, -0.0625],
                    "versions": [["1.7", 2], ["1.8", 2]],
                    "reward_metrics": {"format": 0.5},
                },
                {
                    "text": "ä",
                    "reward": 0.0,
                    "finish_reason": "length",
                    "token_ids": [9],
                    "logprobs": [-2.0],
                    "versions": [["1.8", 1]],
                    "reward_metrics": {},
                },
            ],
        }
    ]


def test_samples_go_to_the_file_of_the_version_at_which_they_ended(tmp_path: Path) -> None:
    log = JsonlRolloutLog(tmp_path)
    log.record(sample("s1"), V7, "trained")
    log.record(sample("s2"), V8, "dropped")
    assert list(tmp_path.iterdir()) == []
    log.flush()
    log.record(sample("s3"), V7, "failed")
    log.close()
    ended = {file.name: [(line["sample_id"], line["fate"]) for line in lines_of(file)] for file in tmp_path.iterdir()}
    assert ended == {"7.jsonl": [("s1", "trained"), ("s3", "failed")], "8.jsonl": [("s2", "dropped")]}


def test_a_large_backlog_is_written_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_log, "MAX_PENDING_BYTES", 1000)
    log = JsonlRolloutLog(tmp_path)
    for index in range(4):
        log.record(sample(f"s{index}"), V7, "trained")
    assert len(lines_of(tmp_path / "7.jsonl")) >= 2


def test_a_disk_error_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = JsonlRolloutLog(tmp_path / "rollouts")
    (tmp_path / "rollouts" / "7.jsonl").mkdir()
    for _ in range(2):
        log.record(sample("s"), V7, "trained")
        log.flush()
    assert log.errors == 2
    assert len(caplog.records) == 1


def test_versions_are_run_length_coded() -> None:
    assert encode_versions([]) == []
    assert encode_versions([V7, V8, V7]) == [("1.7", 1), ("1.8", 1), ("1.7", 1)]
