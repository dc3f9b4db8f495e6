"""A run whose one replica is a stock server: the server is killed in a sync and started again; the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.events import ReplicaChanged, SyncCompleted
from paceline.observability.reader import read_events
from tests.e2e.train_process import TrainProcess, train
from tests.vllm.fleet import shipped_model
from tests.vllm.stock_server import StockServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StockServer]:
    server = StockServer(shipped_model(), tmp_path)
    server.start()
    yield server
    server.kill()


def updates_begun(directory: Path) -> int:
    return (directory / "server.log").read_text(errors="replace").count("POST /start_weight_update")


def kill_in_an_update(server: StockServer, directory: Path, process: TrainProcess) -> None:
    process.until_trained(4)
    seen = updates_begun(directory)
    process.until(lambda: updates_begun(directory) > seen, "the next update of the server's weights")
    server.kill()


def test_the_run_goes_on_with_verified_weights(server: StockServer, tmp_path: Path) -> None:
    settings = [
        "rollout.name=vllm",
        f"rollout.servers=[{server.url}]",
        "rollout.num_replicas=1",
        "rollout.replica_return_seconds=200",
        "rollout.total_rollout_steps=1920",
        "data.val_size=500",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.grace_seconds=0",
    ]
    directory = tmp_path / "run"
    directory.mkdir()
    with train(directory, settings) as process:
        kill_in_an_update(server, tmp_path, process)
        time.sleep(1.0)
        server.start()
        ended = process.end(300.0)
        assert ended.code == 0, ended.err
        events = [record.event for record in read_events(process.run_dir / "events.jsonl")]
    changes = [event.state for event in events if isinstance(event, ReplicaChanged)]
    assert changes.count("lost") == 1
    assert changes.count("ready") >= 2
    syncs = [event for event in events if isinstance(event, SyncCompleted)]
    assert all(sync.verified for sync in syncs)
    assert len(syncs) >= 15
