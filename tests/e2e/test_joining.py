"""A third replica joins a run: verified weights, traffic after its confirmation, the others undisturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.store.serving_table import hash_served
from tests.e2e.train_process import ENDLESS, START_SECONDS, STOP_SECONDS, Event, TrainProcess, train

NEW = "replica-2"


def served(run: TrainProcess, role: str) -> tuple[int, str]:
    """Version and digest of the bytes in the replica's memory, read and hashed here."""
    return hash_served(str(run.run_dir / "serving" / f"{role}.json"))


def windows(run: TrainProcess) -> list[Event]:
    """Those in which the new replica made tokens."""
    return [e for e in run.events("generation.window") if e["replica"] == NEW and e["tokens"] > 0]


@pytest.mark.slow
def test_a_replica_that_is_added_on_the_way(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    settings = [*ENDLESS, "rollout.num_replicas=2", "trainer.logger=[]"]
    with train(tmp_path, settings, module="tests.e2e.joining_run", environment={"PYTHONPATH": root}) as run:
        run.until(lambda: windows(run), "tokens of the new replica", START_SECONDS)
        published = run.until(
            lambda: [e for e in run.events("sync.completed") if NEW in e["pauses"]][2:], "three versions of all three"
        )
        for role in ("replica-0", "replica-1", NEW):
            version, digest = served(run, role)
            captured = {e["version"]: e["digest"] for e in run.events("sync.captured")}
            assert captured[version] == digest
        assert all(e["verified"] and set(e["pauses"]) == {"replica-0", "replica-1", NEW} for e in published)
        changed = [(e["state"], e["t"]) for e in run.events("replica.changed") if e["replica"] == NEW]
        assert [state for state, _ in changed] == ["joining", "ready"]
        confirmed = next(e["t"] for e in run.events("sync.confirmed") if e["replica"] == NEW)
        first_tokens = windows(run)[0]["t"]
        assert confirmed <= changed[1][1] <= first_tokens
        assert {e["state"] for e in run.events("replica.changed") if e["replica"] != NEW} == {"joining", "ready"}
        os.kill(run.process.pid, signal.SIGINT)
        run.end(STOP_SECONDS)
        run.assert_nothing_is_left()
