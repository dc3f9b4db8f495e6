"""Faults on the road of the weights, in a whole run on one event loop: C06, C07, C08 and C25."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import pytest
import torch

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.config import Config, build_config
from paceline.core.errors import NonFiniteWeights, SyncError
from paceline.core.events import SyncAborted, SyncCompleted, SyncConfirmed, SyncSkipped
from paceline.core.version import Version
from paceline.runtime.local_runtime import LocalPorts, LocalRuntime
from paceline.runtime.system import InlineWork
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.recording import RecordingBoard, RecordingEvents, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.testing.weight_memory import OwnedWeights, WeightMemory
from paceline.weights.digest import digest_tensors
from tests.simulation.test_local_run import CharDecoder, LengthReward, Prompts


def config_of(steps: int = 6, **checkpoint_engine: object) -> Config:
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"trigger_parameter_sync_step": 1},
            "rollout": {"n": 2, "total_rollout_steps": 4 * steps, "max_num_seqs": 4},
            "trainer": {"test_freq": 0, "val_before_train": False},
            "data": {"max_response_length": 5},
            "checkpoint_engine": checkpoint_engine,
        }
    )


class Run:
    """One local run; `engines` are those that were made, `backend` is the trainer's."""

    def __init__(
        self, config: Config, backend: MarkerBackend, make_engine: Callable[[int], MarkerEngine] | None = None
    ) -> None:
        self.config, self.backend, self.events = config, backend, RecordingEvents()
        self.engines: list[MarkerEngine] = []
        self._make_engine = make_engine or (lambda index: MarkerEngine(places=4))

    def start(self) -> None:
        exchange = InProcessExchange()
        sender = InProcessSender(
            exchange, arenas=self.config.arenas, dtype=None, nonfinite=self.config.checkpoint_engine.guard
        )

        def engine(index: int) -> MarkerEngine:
            self.engines.append(self._make_engine(index))
            return self.engines[-1]

        async def main(clock: VirtualClock) -> None:
            ports = LocalPorts(
                backend=self.backend,
                sender=sender,
                make_engine=engine,
                make_receiver=lambda index: InProcessReceiver(exchange, holder=f"replica-{index}", verify="full"),
                board=RecordingBoard(),
                prompts=Prompts(),
                reward=LengthReward(),
                decoder=CharDecoder(),
                stop_token_ids=(),
                rollout_log=RecordingRolloutLog(),
                work=InlineWork(),
                clock=clock,
                events=self.events,
            )
            await LocalRuntime(self.config, ports, life=1).run()

        run_virtual(main)

    def completed(self) -> list[int]:
        return [Version.unpack(event.version).n for event in self.events.of(SyncCompleted)]


# ---- C25 ------------------------------------------------------------------------------------------------------------


class NanBackend(MarkerBackend):
    """Its weights are NaN after some of its updates, as after one bad step that is taken back."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self._bad = bad

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in super().named_tensors():
            bad = name == "weight" and len(self.batches) in self._bad
            yield name, torch.cat([tensor[:3], torch.tensor([math.nan]), tensor[4:]]) if bad else tensor


class TiedNanBackend(NanBackend):
    """The same without the tie, which a copy would break."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [(name, tensor.clone()) for name, tensor in super().named_tensors()]


def test_c25_skip_leaves_the_version_and_the_run_goes_on() -> None:
    run = Run(config_of(nonfinite="skip"), TiedNanBackend({2, 4}))
    run.start()
    skipped = run.events.of(SyncSkipped)
    assert [Version.unpack(event.version).n for event in skipped] == [2, 3]
    assert all("'weight': 1" in event.error for event in skipped)
    assert run.completed() == [0, 1, 2, 3, 4]
    assert run.events.of(SyncAborted) == []
    assert len(run.backend.batches) == 6


def test_c25_error_ends_the_run_and_names_the_tensor() -> None:
    run = Run(config_of(nonfinite="error"), TiedNanBackend({2}))
    with pytest.raises(NonFiniteWeights, match="'weight': 1"):
        run.start()
    assert run.completed() == [0, 1]
    assert [event.phase for event in run.events.of(SyncAborted)] == ["update_weights"]


def test_c25_a_first_version_cannot_be_skipped() -> None:
    run = Run(config_of(nonfinite="skip"), TiedNanBackend({0}))
    with pytest.raises(NonFiniteWeights):
        run.start()


def test_c25_off_serves_what_the_trainer_has() -> None:
    run = Run(config_of(nonfinite="off"), TiedNanBackend({2}))
    run.start()
    assert run.completed() == [0, 1, 2, 3, 4, 5, 6]


# ---- C06 ------------------------------------------------------------------------------------------------------------


class HeadedBackend(MarkerBackend):
    """A trainer with a value head and a wrapper's prefix."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "value_head.weight", torch.ones(3)
        for name, tensor in super().named_tensors():
            yield f"module.{name}", tensor


def test_c06_what_is_not_declared_is_refused_before_any_replica_changes() -> None:
    run = Run(config_of(name_rules=[["module.", ""]]), HeadedBackend())
    with pytest.raises(SyncError, match=r"'value_head.weight' has no receiver and is not declared trainer-only"):
        run.start()
    assert run.events.of(SyncConfirmed) == []
    assert [engine.version for engine in run.engines] == [None] * len(run.engines)


def test_c06_declared_names_make_a_run_without_loss() -> None:
    run = Run(config_of(name_rules=[["module.", ""]], trainer_only=["value_head.*"]), HeadedBackend())
    run.start()
    assert run.completed() == [0, 1, 2, 3, 4, 5, 6]


class StaticEngine(MarkerEngine):
    """Has a table of its own that no trainer sends."""

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {**super().expected_tensors(), "rope.inv_freq": ("float32", (4,))}

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._memory.put({**tensors, "rope.inv_freq": torch.ones(4)})
        self._version = version


@pytest.mark.parametrize("declared", [(), ("rope.*",)])
def test_an_engines_own_table_has_to_be_declared(declared: tuple[str, ...]) -> None:
    run = Run(config_of(engine_static=declared), MarkerBackend(), lambda index: StaticEngine(places=4))
    if declared:
        run.start()
        assert run.completed()[-1] == 6
    else:
        with pytest.raises(SyncError, match=r"'rope.inv_freq' is missing"):
            run.start()


# ---- C07, C08 -------------------------------------------------------------------------------------------------------


class FailsAt:
    """Memory of an engine whose copy fails in the middle, at the n-th version."""

    def __init__(self, nth: int) -> None:
        self._owned = OwnedWeights()
        self._left = nth

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        return self._owned.apply

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._owned.tensors

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left -= 1
        self._owned.fail_at = "weight" if self._left == 0 else None
        self._owned.put(tensors)

    def clear(self) -> None:
        self._owned.clear()


def test_c07_c08_a_replica_whose_copy_fails_is_named_and_gets_the_whole_next_version() -> None:
    def make_engine(index: int) -> MarkerEngine:
        memory: WeightMemory = FailsAt(3) if index == 1 else OwnedWeights()
        return MarkerEngine(places=4, memory=memory)

    run = Run(config_of(), MarkerBackend(), make_engine)
    run.start()
    failed = [event for event in run.events.of(SyncCompleted) if event.fenced]
    assert [(Version.unpack(event.version).n, event.fenced) for event in failed] == [(2, ["replica-1"])]
    confirmed = [
        Version.unpack(event.version).n for event in run.events.of(SyncConfirmed) if event.replica == "replica-1"
    ]
    assert confirmed == sorted(set(confirmed))
    assert confirmed[-1] == 6
    digests = {digest_tensors(engine.served_tensors(), {"head": "weight"}) for engine in run.engines if engine.version}
    assert digests == {digest_tensors(dict(run.backend.named_tensors()), {"head": "weight"})}
