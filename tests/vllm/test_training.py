"""`paceline train rollout.name=vllm` on the shipped model: it learns, every sync is verified, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.events import SampleAdmitted, SampleTrained, SyncCompleted
from paceline.observability.reader import read_events
from tests.e2e.train_process import train

GOOD = 0.80


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of forty updates over two vLLM engines."""
    directory = tmp_path_factory.mktemp("train")
    settings = [
        "rollout.total_rollout_steps=2560",
        "data.val_size=1000",
        "trainer.save_freq=0",
        "trainer.grace_seconds=0",
    ]
    with train(directory, ["rollout.name=vllm", *settings]) as process:
        ended = process.end(600.0)
        assert ended.code == 0, ended.err
        process.assert_nothing_is_left()
        return process.run_dir


def test_a_run_served_by_vllm_learns(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["val_accuracy_last"] >= GOOD
    assert summary["val_accuracy_first"] < GOOD - 0.2
    assert summary["steps"] == 40


def test_every_sync_was_verified_and_every_sample_ended(run: Path) -> None:
    events = [record.event for record in read_events(run / "events.jsonl")]
    syncs = [event for event in events if isinstance(event, SyncCompleted)]
    assert len(syncs) == 21
    assert all(sync.verified and not sync.fenced for sync in syncs)
    admitted = [name for event in events if isinstance(event, SampleAdmitted) for name in event.ids]
    trained = [name for event in events if isinstance(event, SampleTrained) for name in event.ids]
    assert sorted(admitted) == sorted(trained)
    assert len(trained) == 2560
