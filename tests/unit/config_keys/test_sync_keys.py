"""Keys of a weight sync: who swaps when, what is checked, which names fit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping

import pytest
import torch

from paceline.core.commands import StageCommand, StageReport, SwapCommand, SwapReport
from paceline.core.errors import CoverageError, DeadlineExceeded, NonFiniteWeights, PacelineError, SyncError
from paceline.core.events import SyncAborted
from paceline.core.version import Version
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica, RecordingTrainer
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.config_keys.marker_run import run_marked


class SlowReplica(RecordingReplica):
    """Swaps in 1 s; `swapping` is shared by all."""

    def __init__(self, replica_id: str, swapping: list[str], most: list[int]) -> None:
        super().__init__(CallLog(), replica_id)
        self._swapping = swapping
        self._most = most

    async def swap(self, command: SwapCommand) -> SwapReport:
        self._swapping.append(self.replica_id)
        self._most.append(len(self._swapping))
        await asyncio.sleep(1)
        self._swapping.remove(self.replica_id)
        return await super().swap(command)


class StuckReplica(RecordingReplica):
    """Never has staged anything."""

    async def stage(self, command: StageCommand) -> StageReport:
        await asyncio.Event().wait()
        raise AssertionError


def most_swaps_at_once(settings: dict[str, object]) -> int:
    most: list[int] = []

    async def main(clock: VirtualClock) -> None:
        swapping: list[str] = []
        replicas = [SlowReplica(f"replica-{i}", swapping, most) for i in range(4)]
        manager = CheckpointEngineManager(
            config_with(settings), RecordingTrainer(CallLog()), replicas, clock=clock, events=RecordingEvents()
        )
        await manager.update_weights(0, version=Version(1, 0).packed)

    run_virtual(main)
    return max(most)


@shows("checkpoint_engine.update_order", "checkpoint_engine.rolling_size")
def test_replicas_swap_all_at_once_or_some_at_a_time() -> None:
    rolling: dict[str, object] = {"checkpoint_engine.update_order": "rolling"}
    assert most_swaps_at_once({"checkpoint_engine.update_order": "all"}) == 4
    assert most_swaps_at_once(rolling) == 1
    assert most_swaps_at_once({**rolling, "checkpoint_engine.rolling_size": 2}) == 2


@shows("checkpoint_engine.sync_timeout_seconds")
def test_a_phase_of_a_sync_ends_at_its_deadline() -> None:
    def gave_up_after(timeout: float) -> float:
        async def main(clock: VirtualClock) -> float:
            manager = CheckpointEngineManager(
                config_with({"checkpoint_engine.sync_timeout_seconds": timeout}),
                RecordingTrainer(CallLog()),
                [StuckReplica(CallLog(), "replica-0")],
                clock=clock,
                events=RecordingEvents(),
            )
            with pytest.raises((SyncError, DeadlineExceeded), match="replica-0"):
                await manager.update_weights(0, version=Version(1, 0).packed)
            return clock.now()

        return run_virtual(main)

    assert gave_up_after(5) == pytest.approx(5, abs=0.5)
    assert gave_up_after(25) == pytest.approx(25, abs=0.5)


class BrokenOnce(MarkerEngine):
    """Refuses its third version, once."""

    def __init__(self) -> None:
        super().__init__(places=4)
        self._binds = 0

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._binds += 1
        if self._binds == 3:
            raise CoverageError("refused once")
        super().bind(tensors, version)


@shows("checkpoint_engine.sync_attempts")
def test_an_aborted_sync_is_tried_again() -> None:
    settings: dict[str, object] = {
        "rollout.num_replicas": 1,
        "trainer.test_freq": 0,
        "trainer.val_before_train": False,
        "rollout.total_rollout_steps": 16,
    }
    with pytest.raises(PacelineError, match="refused once"):
        run_marked({**settings, "checkpoint_engine.sync_attempts": 1}, make_engine=BrokenOnce)
    run = run_marked({**settings, "checkpoint_engine.sync_attempts": 3}, make_engine=BrokenOnce)
    assert len(run.events.of(SyncAborted)) == 1
    assert run.published == [0, 1, 3, 4, 5]


class Diverging(MarkerBackend):
    """After its third update a weight is infinite until the fourth."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        named = dict(super().named_tensors())
        if int(named["marker"][0]) == 3:
            named["weight"] = torch.full_like(named["weight"], math.inf)
            named["head"] = named["weight"]
        return named.items()


@shows("checkpoint_engine.nonfinite")
def test_infinite_weights_end_the_run_or_cost_a_sync_or_go_through() -> None:
    with pytest.raises(NonFiniteWeights, match="weight"):
        run_marked({"checkpoint_engine.nonfinite": "error"}, backend=Diverging())
    skipped = run_marked({"checkpoint_engine.nonfinite": "skip"}, backend=Diverging())
    through = run_marked({"checkpoint_engine.nonfinite": "off"}, backend=Diverging())
    assert len(through.published) == len(skipped.published) + 1


class Renamed(MarkerBackend):
    """Names as a wrapper makes them, and a tensor that the engine has no use for."""

    def __init__(self, prefix: str = "", extra: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        self._extra = extra

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        named = [(f"{self._prefix}{name}", tensor) for name, tensor in super().named_tensors()]
        return [*named, (self._extra, torch.zeros(2))] if self._extra else named


class WithTable(MarkerEngine):
    """Has a tensor that no trainer sends."""

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {**super().expected_tensors(), "rotary.table": ("float32", (2,))}

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        super().bind({name: tensor for name, tensor in tensors.items() if name != "rotary.table"}, version)


@shows("checkpoint_engine.name_rules")
def test_name_rules_make_the_trainers_names_the_engines() -> None:
    with pytest.raises(PacelineError, match=r"module\.marker"):
        run_marked({}, backend=Renamed(prefix="module."))
    rules = {"checkpoint_engine.name_rules": [["module.", ""]]}
    assert len(run_marked(rules, backend=Renamed(prefix="module.")).published) == 9


@shows("checkpoint_engine.trainer_only")
def test_tensors_of_the_trainer_alone_are_left_out() -> None:
    with pytest.raises(PacelineError, match=r"value_head\.bias"):
        run_marked({}, backend=Renamed(extra="value_head.bias"))
    left_out = {"checkpoint_engine.trainer_only": ["value_head.*"]}
    assert len(run_marked(left_out, backend=Renamed(extra="value_head.bias")).published) == 9


@shows("checkpoint_engine.engine_static")
def test_tensors_of_the_engine_alone_are_not_missed() -> None:
    def engine() -> MarkerEngine:
        return WithTable(places=4)

    with pytest.raises(PacelineError, match=r"rotary\.table"):
        run_marked({}, make_engine=engine)
    static = {"checkpoint_engine.engine_static": ["rotary.*"]}
    assert len(run_marked(static, make_engine=engine).published) == 9
