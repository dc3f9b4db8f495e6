"""`ray.address`: two users train in one running cluster at the same time; it is there before them and after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.head_node import head_node
from tests.e2e.train_process import SHORT, STOP_SECONDS, Ended, TrainProcess, train

TRAIN_SECONDS = 300.0


def finish(run: TrainProcess) -> Ended:
    run.process.wait(timeout=TRAIN_SECONDS)
    return run.end(STOP_SECONDS)


@pytest.mark.slow
def test_two_runs_share_a_cluster_and_nothing_else(tmp_path: Path) -> None:
    with head_node() as address:
        first, second = tmp_path / "first", tmp_path / "second"
        first.mkdir()
        second.mkdir()
        by_address, by_auto = [*SHORT, f"ray.address={address}"], [*SHORT, "ray.address=auto", "trainer.seed=1"]
        with train(first, by_address) as one, train(second, by_auto, environment={"RAY_ADDRESS": address}) as other:
            ended = [finish(run) for run in (one, other)]
            assert [end.code for end in ended] == [0, 0], ended
            for run in (one, other):
                summary = run.summary()
                assert summary["outcome"] == "completed"
                assert summary["samples"]["trained"] == summary["samples"]["admitted"] == 640
                assert summary["syncs"]["verified_count"] == summary["syncs"]["count"]
                assert summary["ledger_errors"] == []
                run.assert_nothing_is_left()
            # Another run after them: the cluster has neither died with the first two nor kept anything of theirs.
            third = tmp_path / "third"
            third.mkdir()
            with train(third, by_address) as last:
                assert finish(last).code == 0
