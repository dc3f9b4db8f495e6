"""A run that was killed or preempted goes on with the same command line, as if nothing had happened.

What was trained is recomputed from the event log and the rollout files by a script that shares no code with the run.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

from benchmarks.kill_resume import made_again, run_with_kills
from benchmarks.lineage_check import check, lives_of, read_lines
from tests.e2e.train_process import STOP_SECONDS, train

UPDATES = 24
ON_POLICY = [
    f"rollout.total_rollout_steps={64 * UPDATES}",
    "data.val_size=50",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=4",
    "async_training.staleness_threshold=0",
    "async_training.trigger_parameter_sync_step=2",
]


def test_a_run_whose_trainer_and_then_whose_driver_was_killed(tmp_path: Path) -> None:
    outcome = run_with_kills(tmp_path / "run", UPDATES, ["trainer", "run"], random.Random(0), [])
    assert outcome.findings.problems == []
    assert outcome.findings.trained == 64 * UPDATES
    assert [kill.target for kill in outcome.kills] == ["trainer", "run"]
    counts = [made_again(kill, outcome.findings) for kill in outcome.kills]
    in_flight, again = sum(flight for flight, _ in counts), sum(made for _, made in counts)
    assert in_flight > 0
    assert again < in_flight / 2, "responses in flight were begun anew"
    summary = json.loads((outcome.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["lives"] == 3
    assert summary["ledger_errors"] == []
    assert summary["samples"]["trained"] == 64 * UPDATES
    assert summary["samples"]["dropped"].get("lost_lineage", 0) == outcome.findings.lost_samples
    assert summary["lost_lineage"]["updates"] == outcome.findings.lost_updates


def test_a_preempted_run_on_policy_loses_no_update(tmp_path: Path) -> None:
    with train(tmp_path, ON_POLICY) as run:
        run.until_trained(5)
        os.kill(run.process.pid, signal.SIGTERM)
        ended = run.end(STOP_SECONDS)
        assert (ended.code, ended.err) == (128 + signal.SIGTERM, "paceline: error: stopped by SIGTERM\n")
        run.assert_nothing_is_left()
        run_dir = run.run_dir
    with train(tmp_path, ON_POLICY) as again:
        assert again.process.wait(timeout=300) == 0, again.output()
    findings = check(run_dir)
    assert findings.problems == []
    assert (findings.trained, findings.lost_updates) == (64 * UPDATES, 0)
    assert [life.number for life in lives_of(run_dir)] == [1, 2]
    assert_strictly_on_policy(run_dir)


def assert_strictly_on_policy(run_dir: Path) -> None:
    """Every token trained at update k was made by version floor((k - 1) / 2)."""
    events = read_lines(run_dir / "events.jsonl")
    step_of = {one: e["step"] for e in events if e["kind"] == "sample.trained" for one in e["ids"]}
    records = [record for path in (run_dir / "rollouts").glob("*.jsonl") for record in read_lines(path)]
    assert len(records) == 64 * UPDATES
    for record in records:
        expected = (step_of[record["sample_id"]] - 1) // 2
        versions = [version for response in record["responses"] for version, _ in response["versions"]]
        assert {int(version.partition(".")[2]) for version in versions} == {expected}, record["sample_id"]
