"""The trainer's side of validations as a process: it does its share, and without it the replicas do all."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from tests.e2e.train_process import STOP_SECONDS, train

PROBLEMS = 60
SETTINGS = [
    "rollout.total_rollout_steps=3200",
    f"data.val_size={PROBLEMS}",
    "trainer.test_freq=2",
    "trainer.logger=[]",
    "async_training.use_trainer_do_validate=true",
]


def test_its_share_and_its_death(tmp_path: Path) -> None:
    with train(tmp_path, SETTINGS) as run:
        run.until(lambda: [e for e in run.events("validation.finished") if e["by_trainer"] > 0], "a share")
        os.kill(run.until_started("validator"), signal.SIGKILL)
        run.process.wait(timeout=300)
        ended = run.end(STOP_SECONDS)
        assert (ended.code, ended.err) == (0, "")
        records = run.events("validation.finished")
        assert {record["problems"] for record in records} == {PROBLEMS}
        every = records + run.events("validation.skipped")
        assert set(Counter(record["version"] for record in every).values()) == {1}
        assert {record["by_trainer"] for record in records} == {0, PROBLEMS // 3}  # of two replicas and itself
        assert records[-1]["by_trainer"] == 0
        assert "validator died" in records[-1]["trainer_error"]
        assert run.summary()["ledger_errors"] == []
        run.assert_nothing_is_left()
