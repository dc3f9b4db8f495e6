"""`paceline report` folds a run's log again; `paceline verify` compares what a replica serves with the log."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli import verify_command
from paceline.cli.main import main
from paceline.core.config import build_config
from paceline.core.errors import SyncError
from paceline.core.events import AnyEvent, RunFinished, SampleAdmitted, SyncCaptured
from paceline.core.version import Version
from paceline.observability.event_log import EventLog
from paceline.observability.reader import read_events
from paceline.observability.summary import encode_summary, fold_summary
from paceline.runtime.worker_proof import leave_note
from tests.unit.engine.fake_vllm_http import listening
from tests.unit.engine.vllm_rig import Rig

V3 = Version(1, 3).packed
NOT_VERIFIED = "replica-0: cannot be verified: "


def write_run(directory: Path, *events: AnyEvent) -> Path:
    log = EventLog(directory / "events.jsonl", "driver", lambda: 5.0)
    for event in events:
        log.emit(event)
    log.close()
    (directory / "summary.json").write_bytes(encode_summary(fold_summary(read_events(directory / "events.jsonl"))))
    return directory


COMPLETED = RunFinished(outcome="completed", error="", exit_code=0)


def test_a_report_shows_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write_run(tmp_path, COMPLETED))]) == 0
    shown = capsys.readouterr().out
    assert "completed" in shown
    assert "differs" not in shown


def test_a_report_names_what_summary_json_says_differently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, COMPLETED)
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    (tmp_path / "summary.json").write_text(json.dumps({**written, "steps": 160}), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 1
    assert "summary.json differs in steps: 160, the log says 0" in capsys.readouterr().out


def test_a_report_of_a_ledger_that_does_not_add_up_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SampleAdmitted(ids=["a"]), COMPLETED)
    assert main(["report", str(tmp_path)]) == 1
    assert "open although the run is completed" in capsys.readouterr().out


def test_a_report_of_an_unfinished_run_needs_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, SampleAdmitted(ids=["a"]))
    (tmp_path / "summary.json").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "unfinished" in capsys.readouterr().out


def test_a_log_with_an_unknown_event_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, COMPLETED)
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"t":1.0,"proc":"x","seq":0,"kind":"no.such"}\n')
    assert main(["report", str(tmp_path)]) == 1
    assert "events.jsonl line 2: " in capsys.readouterr().err


def captured(digest: str) -> SyncCaptured:
    return SyncCaptured(version=V3, bytes=8, digest=digest, seconds=0.1, wait_seconds=0.0)


@pytest.mark.parametrize(
    ("served", "code", "words"),
    [
        ((V3, "abc"), 0, "replica-0: version 1.3: verified, serves abc"),
        ((V3, "abd"), 1, "replica-0: version 1.3: MISMATCH: serves abd, published abc"),
        ((V3 + 1, "abc"), 1, "replica-0: version 1.4: serves abc, but the log has no capture of this version"),
        (SyncError("replica-0 (pid 1) is gone"), 1, "replica-0: cannot be verified: replica-0 (pid 1) is gone"),
    ],
)
def test_a_replica_is_compared_with_the_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: tuple[int, str] | SyncError,
    code: int,
    words: str,
) -> None:
    def hash_served(path: str) -> tuple[int, str]:
        assert path == str(tmp_path / "serving" / "replica-0.json")
        if isinstance(served, SyncError):
            raise served
        return served

    write_run(tmp_path, captured("abc"))
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "replica-0.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(verify_command, "hash_served", hash_served)
    assert main(["verify", str(tmp_path)]) == code
    assert capsys.readouterr().out.strip() == words


def test_a_run_that_is_over_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, COMPLETED)
    assert main(["verify", str(tmp_path)]) == 1
    assert "no replica of" in capsys.readouterr().err


def test_a_replica_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, captured("abc"))
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "replica-0.json").write_text("no table", encoding="utf-8")
    assert main(["verify", str(tmp_path)]) == 1
    assert "replica-0: cannot be verified: " in capsys.readouterr().out


def test_the_workers_of_a_server_are_asked_what_they_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig()
    manifest = rig.publish(3)
    rig.serve(manifest)
    write_run(tmp_path, captured(manifest.digest))
    with listening(rig.worker) as server:
        spec = SimpleNamespace(
            serving_dir=tmp_path / "serving",
            config=build_config({"rollout": {"name": "vllm", "servers": [server.url], "num_replicas": 1}}),
        )
        leave_note(spec, "replica-0")  # type: ignore[arg-type]

        def said(label: str) -> tuple[int, str]:
            server.label = label
            return main(["verify", str(tmp_path)]), capsys.readouterr().out.strip()

        proof = f"each worker of {server.url} has loaded {manifest.digest}, as published"
        assert said("1.3") == (0, f"replica-0: version 1.3: {proof}")
        assert said("default") == (
            1,
            NOT_VERIFIED + "the server serves weights of its own, of which the log has no capture",
        )
        assert said("1.4")[1].endswith("serves version 1.4, of which the log has no capture")
        rig.serve(rig.publish(4, q=2.0))
        code, line = said("1.3")
        assert code == 1
        assert line.startswith(NOT_VERIFIED + "what entered the model is 1.4 ")


def test_engines_of_a_run_are_proved_by_the_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, captured("abc"))
    spec = SimpleNamespace(serving_dir=tmp_path / "serving", config=build_config({"rollout": {"name": "vllm"}}))
    leave_note(spec, "replica-1")  # type: ignore[arg-type]
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(
        "replica-1: cannot be verified: its vLLM engine is asked by the run alone"
    )
