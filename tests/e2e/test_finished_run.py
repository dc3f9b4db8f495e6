"""What a finished run has printed and left: the log, the summary computed again from raw lines, rollouts, the model."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from paceline.cli.config_files import load_config
from paceline.observability.reader import read_events
from paceline.observability.summary import fold_summary
from tests.e2e.conftest import Pair
from tests.e2e.train_process import SHORT, Event, TrainProcess, has_escape_codes, read_lines

UPDATES = 10
SYNCS = 6
FIELDS = {
    "val_accuracy_first",
    "val_accuracy_last",
    "train_seconds",
    "startup_seconds",
    "versions",
    "syncs",
    "samples",
    "version_lag",
    "tokens_generated",
    "trainer_idle_ratio",
    "rollouter_idle_ratio",
}
INNER_FIELDS = {
    "syncs": {
        "count",
        "verified_count",
        "bytes",
        "seconds_p50",
        "seconds_p99",
        "pause_seconds_p50",
        "pause_seconds_p99",
    },
    "samples": {"admitted", "trained", "dropped", "failed", "open"},
    "version_lag": {"mean", "p99", "max", "predicted_mean"},
}


@pytest.fixture(scope="module")
def events(finished: TrainProcess) -> list[Event]:
    return read_lines(finished.run_dir / "events.jsonl")


@pytest.fixture(scope="module")
def rollouts(finished: TrainProcess) -> list[Event]:
    """All lines of all rollout files, each with the number in its file's name."""
    files = sorted((finished.run_dir / "rollouts").iterdir())
    return [{**line, "file": file.stem} for file in files for line in read_lines(file)]


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def ids_of(events: list[Event], kind: str) -> list[str]:
    return list(chain.from_iterable(event["ids"] for event in of(events, kind)))


def number(version: str) -> int:
    """n of "life.n"; the run has one life."""
    life, _, n = version.partition(".")
    assert life == "1"
    return int(n)


def versions_of(response: dict[str, Any]) -> list[int]:
    return [number(version) for version, count in response["versions"] for _ in range(count)]


def test_the_output_is_plain_lines_and_nothing_on_stderr(pair: Pair) -> None:
    for ended in pair.ended:
        assert ended.err == ""
        assert not has_escape_codes(ended.out)
        assert ended.out.isascii()
        assert re.search(r"^outcome +completed$", ended.out, re.MULTILINE)
        assert len(re.findall(r"^step ", ended.out, re.MULTILINE)) >= 2


def test_two_runs_at_once_leave_nothing_and_share_nothing(pair: Pair) -> None:
    for run in pair.runs:
        run.assert_nothing_is_left()
        left = {path.name for path in run.run_dir.iterdir()}
        assert left >= {"config.yaml", "events.jsonl", "model", "rollouts", "summary.json", "tensorboard"}
        assert not left & {"serving", "faults.log"}
    one, other = (run.summary() for run in pair.runs)
    assert one["run_id"] != other["run_id"]
    first, second = ((run.run_dir / "model" / "model.safetensors").read_bytes() for run in pair.runs)
    assert first != second


def test_config_yaml_gives_the_same_configuration_again(finished: TrainProcess) -> None:
    assert load_config(finished.run_dir / "config.yaml", []) == load_config(None, SHORT)


def test_every_line_of_the_log_is_of_the_schema_and_none_is_lost(finished: TrainProcess, events: list[Event]) -> None:
    assert len(read_events(finished.run_dir / "events.jsonl")) == len(events)
    for proc in {event["proc"] for event in events}:
        assert [e["seq"] for e in events if e["proc"] == proc] == list(range(sum(e["proc"] == proc for e in events)))
    assert events[-1]["kind"] == "run.finished"


def test_the_summary_has_all_fields_and_is_a_fold_over_the_log(finished: TrainProcess) -> None:
    summary = finished.summary()
    assert summary.keys() >= FIELDS
    for name, fields in INNER_FIELDS.items():
        assert summary[name].keys() >= fields
    folded = fold_summary(read_events(finished.run_dir / "events.jsonl"))
    assert summary == msgspec.json.decode(msgspec.json.encode(folded))
    assert (summary["outcome"], summary["ledger_errors"], summary["lost_events"]) == ("completed", [], 0)


def test_accuracies_and_versions_are_those_of_the_log(finished: TrainProcess, events: list[Event]) -> None:
    summary = finished.summary()
    measured = {event["version"]: event["accuracy"] for event in of(events, "validation.finished")}
    assert summary["val_accuracy_first"] == measured[min(measured)]
    assert summary["val_accuracy_last"] == measured[max(measured)]
    published = [event["version"] for event in of(events, "sync.completed")]
    assert published == sorted(set(published))
    assert max(measured) == max(published)
    assert summary["versions"] == len(published) == SYNCS
    assert summary["steps"] == len(of(events, "train.step")) == UPDATES


def test_all_syncs_are_verified_by_every_replica(finished: TrainProcess, events: list[Event]) -> None:
    digests = {event["version"]: event["digest"] for event in of(events, "sync.captured")}
    confirmed = Counter((e["version"], e["digest"] == digests[e["version"]]) for e in of(events, "sync.confirmed"))
    assert confirmed == {(version, True): 2 for version in digests}
    assert all(event["verified"] for event in of(events, "sync.staged"))
    assert len(set(digests.values())) == SYNCS
    syncs = finished.summary()["syncs"]
    assert syncs["count"] == syncs["verified_count"] == SYNCS
    assert syncs["bytes"] == sum(event["bytes"] for event in of(events, "sync.captured"))


def test_every_sample_ends_once_and_the_ledger_says_so(
    finished: TrainProcess, events: list[Event], rollouts: list[Event]
) -> None:
    admitted, trained = ids_of(events, "sample.admitted"), ids_of(events, "sample.trained")
    assert len(set(admitted)) == len(admitted)
    assert sorted(admitted) == sorted(trained) == sorted(line["sample_id"] for line in rollouts)
    expected = {"admitted": len(admitted), "trained": len(trained), "dropped": {}, "failed": 0, "open": 0}
    assert finished.summary()["samples"] == expected
    assert len(trained) == 640


def test_lag_and_tokens_follow_from_the_rollouts(
    finished: TrainProcess, events: list[Event], rollouts: list[Event]
) -> None:
    responses = [(number(line["version"]), response) for line in rollouts for response in line["responses"]]
    lags = [ended - version for ended, response in responses for version in versions_of(response)]
    assert min(lags) >= 0
    summary = finished.summary()
    assert summary["version_lag"]["mean"] == pytest.approx(sum(lags) / len(lags))
    assert summary["version_lag"]["max"] == max(lags)
    # Every response was trained, so as many tokens were made as were trained.
    assert summary["tokens_generated"] == len(lags)
    assert sum(event["tokens"] for event in of(events, "train.step")) == len(lags)
    logged = Counter({int(lag): 0 for event in of(events, "sample.trained") for lag in event["lags"]})
    for event in of(events, "sample.trained"):
        logged.update({int(lag): count for lag, count in event["lags"].items()})
    assert logged == Counter(lags)


def test_rollouts_are_complete_records(rollouts: list[Event]) -> None:
    assert {line["fate"] for line in rollouts} == {"trained"}
    for line in rollouts:
        assert number(line["version"]) == int(line["file"])
        assert len(line["responses"]) == 8
        for response in line["responses"]:
            length = len(response["token_ids"])
            assert 1 <= length == len(response["logprobs"]) == len(versions_of(response)) <= 8
            assert all(logprob <= 0 for logprob in response["logprobs"])
            assert response["reward"] == float(response["text"] == line["ground_truth"])
    assert any(response["reward"] for line in rollouts for response in line["responses"])


def test_tensorboard_has_a_scalar_for_every_update(finished: TrainProcess) -> None:
    found: dict[str, list[int]] = {}
    for file in (finished.run_dir / "tensorboard").iterdir():
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    for tag in ("actor/grad_norm", "actor/pg_loss", "critic/rewards/mean"):
        assert found[tag] == list(range(1, UPDATES + 1))
    assert found["val/accuracy"] == [0, UPDATES]


def test_the_shipped_model_is_where_the_run_began(finished: TrainProcess, tmp_path: Path) -> None:
    assert finished.run_dir.parent.parts[-3:] == ("runs", "paceline", "arithmetic")
    assert finished.summary()["val_accuracy_first"] <= 0.6
