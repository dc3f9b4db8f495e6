"""Which checkpoint a run goes on from: torn ones, live runs, lives that left nothing, half lines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.core.config import build_config
from paceline.core.errors import ConfigError, DeadlineExceeded
from paceline.core.events import Event, RunResumed, RunStarted
from paceline.core.version import Lineage
from paceline.observability.event_log import EventLog
from paceline.observability.reader import read_events
from paceline.runtime.run_directory import create_run
from paceline.runtime.run_lock import RunLock, hold_as_process, wait_for_processes
from paceline.runtime.spec import RunSpec, decode_spec, encode_spec
from tests.unit.runtime.saved_runs import save_run

CONFIG = build_config({})


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def start() -> RunSpec:
    """A driver that is gone again at once."""
    lock = RunLock()
    try:
        return create_run(CONFIG, lock)
    finally:
        lock.release()


def log(spec: RunSpec, *events: Event) -> None:
    written = EventLog(spec.events_path, "driver", lambda: 0.0)
    for event in events:
        written.emit(event)
    written.close()


def started(life: int) -> RunStarted:
    return RunStarted(run_id="r", life=life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=9)


def test_a_run_without_a_checkpoint_is_not_gone_on_with() -> None:
    first = save_run(start(), steps=[])
    assert start().run_dir != first.run_dir


def test_a_torn_checkpoint_is_refused_with_its_reason_and_the_one_before_is_taken() -> None:
    first = save_run(start(), steps=[4, 8])
    (first.checkpoints_dir / "global_step_8" / "trainer.safetensors").write_bytes(b"")
    second = start()
    assert second.resumed is not None
    assert second.resumed.step == 4
    assert second.resumed.event.refused == ["global_step_8: trainer.safetensors has 0 bytes, not 7"]
    assert decode_spec(encode_spec(second)) == second


def test_a_torn_checkpoint_that_was_named_is_an_error() -> None:
    first = save_run(start(), steps=[4, 8])
    path = first.checkpoints_dir / "global_step_8"
    (path / "COMPLETE").unlink()
    for name, reason in ((path, "it has no COMPLETE"), (path.parent / "global_step_9", "there is no directory")):
        config = build_config({"trainer": {"resume_mode": "resume_path", "resume_from_path": str(name)}})
        with pytest.raises(ConfigError, match=rf"trainer\.resume_from_path: .*{reason}"):
            create_run(config, RunLock())


def test_a_run_that_lives_is_left_alone() -> None:
    lock = RunLock()
    first = save_run(create_run(CONFIG, lock), steps=[4])
    assert start().run_dir != first.run_dir
    path = str(first.checkpoints_dir / "global_step_4")
    config = build_config({"trainer": {"resume_mode": "resume_path", "resume_from_path": path}})
    with pytest.raises(ConfigError, match="is still running"):
        create_run(config, RunLock())
    lock.release()
    assert create_run(config, RunLock()).run_dir == first.run_dir


def test_lives_are_counted_and_those_that_left_nothing_are_of_the_lineage_by_their_first_version() -> None:
    first = save_run(start(), steps=[4])  # its checkpoint is of version 1.2
    second = start()
    assert (second.life, second.descent) == (2, Lineage(2, 2, {1: 2}))
    assert second.resumed is not None
    log(second, started(2), second.resumed.event)
    third = start()
    assert (third.life, third.run_dir) == (3, first.run_dir)
    assert third.descent == Lineage(3, 2, {1: 2, 2: 2})
    save_run(third, steps=[6])
    fourth = start()
    assert fourth.descent == Lineage(4, 3, {1: 2, 2: 2, 3: 3})


def test_what_a_killed_life_has_left_is_mended() -> None:
    first = save_run(start(), steps=[4])
    with first.events_path.open("ab") as file:
        file.write(b'{"t":1.0,"proc":"tra')
    rollouts = Path(first.run_dir) / "rollouts" / "1.jsonl"
    rollouts.write_bytes(b'{"whole":1}\n{"half')
    (first.checkpoints_dir / ".saving-6").mkdir()
    (first.serving_dir / "replica-0.json").write_text("{}", encoding="utf-8")
    second = start()
    assert second.run_dir == first.run_dir
    log(second, started(2))
    assert [record.event for record in read_events(second.events_path)][-1] == started(2)
    assert rollouts.read_bytes().endswith(b"\n")
    assert sorted(path.name for path in second.checkpoints_dir.iterdir()) == ["global_step_4"]
    assert list(second.serving_dir.iterdir()) == []


HOLDER = """
import sys
from pathlib import Path
from paceline.runtime.run_lock import hold_as_process
held = hold_as_process(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_driver_waits_for_the_processes_of_a_killed_one(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for the end of the processes of the run before"):
            wait_for_processes(tmp_path, 0.2)
        holder.kill()
        wait_for_processes(tmp_path, 30.0)
    hold_as_process(tmp_path)  # any number of them


def test_a_resumed_event_names_what_was_on_its_way() -> None:
    save_run(start(), steps=[4])
    resumed = start().resumed
    assert resumed is not None
    assert resumed.event == RunResumed(from_life=1, step=4, version=(1 << 40) + 2, admitted=32, restored=[], refused=[])
