"""What crosses to the plug-in inside vLLM: checked text there, errors that keep their class back."""

from __future__ import annotations

import asyncio
import base64
import pickle
from types import SimpleNamespace

import msgspec
import pytest
import torch

from paceline.core.errors import ConfigError, DigestMismatch, SyncError
from paceline.core.sample import GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.engine.vllm_async import VllmEngine, VllmOptions
from paceline.engine.vllm_commands import (
    FIELD,
    Confirm,
    Hello,
    Load,
    Stage,
    Staged,
    WorkerCommand,
    error_from,
    error_text,
    pack_command,
    unpack_command,
    version_label,
    version_of_label,
)
from paceline.engine.vllm_control import VllmWeights
from paceline.runtime.system import SystemClock
from paceline.runtime.vllm_plugin import PacelineWeightTransfer
from tests.unit.engine.vllm_rig import SPEC, Rig


def test_commands_cross_as_checked_text() -> None:
    commands: list[WorkerCommand] = [Hello(), Stage(Rig().publish(3), SPEC), Staged(1), Load(2), Confirm(3, "d")]
    for command in commands:
        assert unpack_command(pack_command(command)) == command
    for wrong in (
        {},
        {FIELD: 3},
        {FIELD: "%%%"},
        {FIELD: base64.b64encode(pickle.dumps(Hello())).decode()},
        {FIELD: base64.b64encode(msgspec.msgpack.encode({"type": "Load", "version": "1"})).decode()},
        {**pack_command(Hello()), "more": 1},
    ):
        with pytest.raises(SyncError, match="paceline backend"):
            unpack_command(wrong)


def test_errors_come_back_as_themselves() -> None:
    carried = f"Call to update_weights failed: {error_text(DigestMismatch('other bytes'))}"
    back = error_from(carried)
    assert type(back) is DigestMismatch
    assert back.message == "other bytes"
    assert error_from("CUDA out of memory") is None
    assert type(error_from("[paceline:os] x")) is SyncError


def test_labels_are_versions() -> None:
    version = Version(3, 17).packed
    assert version_of_label(version_label(version)) == version
    for foreign in ("default", "", "1", "1.x", "v1.2"):
        assert version_of_label(foreign) is None


def test_an_engine_refuses_stop_strings_in_one_line() -> None:
    clock = SystemClock()
    engine = VllmEngine(
        VllmOptions(model="m", dtype="float32", max_model_len=8, max_num_seqs=1),
        name="engine",
        clock=clock,
        make_weights=lambda calls: VllmWeights(calls, name="engine", receiver=SPEC, clock=clock),
    )
    params = SamplingParams(1.0, 1.0, -1, 4, (), stop=("end",))

    async def ask() -> None:
        async for _ in engine.generate(GenerationRequest("r", [1], params)):
            pass

    with pytest.raises(ConfigError, match="request r has stop strings, which vLLM replicas do not take"):
        asyncio.run(ask())


def test_the_plug_in_hands_errors_on_as_text() -> None:
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(quantization=None))
    engine = PacelineWeightTransfer(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"\[paceline:SyncError\] the paceline backend takes one entry"):
        engine.init_transfer_engine({"foreign": 1})
    with pytest.raises(RuntimeError, match=r"Hello is no command for update_weights"):
        engine.update_weights(pack_command(Hello()))
    engine.shutdown()
