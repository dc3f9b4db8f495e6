"""`kill -9` of a process of the run: the others end soon, with the cause in one line, and nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.train_process import DEATH_SECONDS, ENDLESS, train

ONE_REPLICA = [*ENDLESS, "rollout.num_replicas=1", "rollout.max_replica_restarts=0"]


@pytest.mark.parametrize("role", ["trainer", "message_queue", "replica-0"])
def test_of_a_part(tmp_path: Path, role: str) -> None:
    with train(tmp_path, ONE_REPLICA) as run:
        pid = run.until_started(role)
        if role != "message_queue":  # whose death comes early, since that is another way through the code
            run.until_trained()
        os.kill(pid, signal.SIGKILL)
        ended = run.end(DEATH_SECONDS)
        assert ended.code == 1
        assert ended.err.startswith("paceline: error: ")
        assert ended.err.count("\n") == 1
        assert role in ended.err
        run.assert_nothing_is_left()
        summary = run.summary()
        assert (summary["outcome"], summary["exit_code"]) == ("failed", 1)
        assert role in summary["error"]
