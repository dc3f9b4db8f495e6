"""Keys of checkpoints and of how a run goes on."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, RunInterrupted
from paceline.core.events import CheckpointSaved, RunFinished
from paceline.observability.event_log import EventLog
from paceline.runtime.run_directory import create_run
from paceline.runtime.run_lock import RunLock
from paceline.runtime.spec import RunSpec
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.task_runner import FullyAsyncTaskRunner
from paceline.store.checkpoint_directory import newest_checkpoint
from tests.simulation.lives import Run
from tests.unit.config_keys.conftest import MakeSpec
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.runtime.saved_runs import save_run


def saved_steps(directory: Path, **trainer: object) -> list[int]:
    run = Run(
        directory,
        {
            "actor": {"ppo_mini_batch_size": 2},
            "async_training": {"trigger_parameter_sync_step": 1},
            "rollout": {"n": 2, "num_replicas": 1, "total_rollout_steps": 12},
            "trainer": {"test_freq": 0, "val_before_train": False, **trainer},
            "data": {"max_response_length": 4},
        },
    )
    run.live()
    return [event.step for event in run.events if isinstance(event, CheckpointSaved)]


@shows("trainer.save_freq")
def test_so_many_updates_lie_between_two_checkpoints(tmp_path: Path) -> None:
    assert saved_steps(tmp_path / "1", save_freq=1) == [1, 2, 3, 4, 5, 6]
    assert saved_steps(tmp_path / "4", save_freq=4) == [4, 6]  # and the end
    assert saved_steps(tmp_path / "0", save_freq=0) == []


@shows("trainer.max_ckpt_to_keep")
def test_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    for keep in (1, 3):
        directory = tmp_path / str(keep)
        saved_steps(directory, save_freq=1, max_ckpt_to_keep=keep)
        assert len(list((directory / "checkpoints").iterdir())) == keep
        assert newest_checkpoint(directory / "checkpoints")[0] == directory / "checkpoints" / "global_step_6"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that runs begin in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dead_run(steps: list[int]) -> RunSpec:
    """A run that was killed after these checkpoints."""
    lock = RunLock()
    spec = save_run(create_run(config_with({}), lock), steps=steps)
    lock.release()
    return spec


@shows("trainer.resume_mode", "trainer.resume_from_path")
def test_which_run_is_gone_on_with(directory: Path) -> None:
    first = dead_run(steps=[4, 8])
    auto = create_run(config_with({}), RunLock())
    assert auto.run_dir == first.run_dir
    assert auto.life == 2
    assert auto.resumed is not None
    assert auto.resumed.step == 8
    disabled = create_run(config_with({"trainer.resume_mode": "disable"}), RunLock())
    assert disabled.run_dir != first.run_dir
    assert (disabled.life, disabled.resumed) == (1, None)


def test_a_named_checkpoint_is_gone_on_from(directory: Path) -> None:
    lock = RunLock()
    first = dead_run(steps=[4, 8])
    path = str(Path(first.run_dir) / "checkpoints" / "global_step_4")
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": path}
    spec = create_run(config_with(named), lock)
    assert (spec.run_dir, spec.life) == (first.run_dir, 2)
    assert spec.resumed is not None
    assert spec.resumed.step == 4
    for settings in ({"trainer.resume_mode": "resume_path"}, {"trainer.resume_from_path": path}):
        with pytest.raises(ConfigError, match="go together"):
            config_with(settings)
    lock.release()


class Trainer:
    """Notes that it was asked to save."""

    def __init__(self, answers_after: float) -> None:
        self.asked = 0
        self.saved = 0
        self._answers_after = answers_after

    async def start(self) -> None: ...

    async def run(self) -> None:
        raise RunInterrupted("stopped by SIGTERM", 15)

    async def stop(self) -> None: ...

    async def preempt(self) -> None:
        self.asked += 1
        await asyncio.sleep(self._answers_after)
        self.saved += 1


class OnePart:
    """A runtime of one trainer; the other parts are the same."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    async def start(self) -> None: ...

    def launch(self, role: str) -> Any:
        return self.trainer if role == "trainer" else Idle()

    async def connect(self) -> None: ...

    def kill(self, role: str) -> None: ...

    def stop(self, deadline_seconds: float) -> None: ...


class Idle:
    async def start(self) -> None: ...

    async def run(self) -> None:
        await asyncio.sleep(3600)

    async def stop(self) -> None: ...

    async def next_loss(self, wait_seconds: float) -> None:
        await asyncio.sleep(wait_seconds)


@shows("trainer.grace_seconds")
@pytest.mark.parametrize(("grace", "asked", "saved"), [(5.0, 1, 1), (0.05, 1, 0), (0.0, 0, 0)])
def test_a_stopped_run_has_so_long_to_save(make_spec: MakeSpec, grace: float, asked: int, saved: int) -> None:
    trainer = Trainer(answers_after=0.3 if grace < 1 else 0.0)
    with StopSignal() as stop:
        spec = make_spec({"trainer.grace_seconds": grace})
        runner = FullyAsyncTaskRunner(spec, OnePart(trainer), [], stop=stop, command_wall=0.0)
        with pytest.raises(RunInterrupted):
            asyncio.run(runner.run())
    assert (trainer.asked, trainer.saved) == (asked, saved)


def test_a_completed_run_is_not_gone_on_with(directory: Path) -> None:
    first = dead_run(steps=[4])
    log = EventLog(Path(first.run_dir) / "events.jsonl", "driver", lambda: 0.0)
    log.emit(RunFinished(outcome="completed", error="", exit_code=0))
    log.close()
    assert create_run(config_with({}), RunLock()).run_dir != first.run_dir


def test_what_decides_a_sample_must_not_change(directory: Path) -> None:
    dead_run(steps=[4])
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0\.5, but .* saved with rollout\.temperature=1\.0"):
        create_run(config_with({"rollout.temperature": 0.5}), RunLock())
