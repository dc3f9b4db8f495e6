"""The training state: after it was restored the next step is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.backend.torch_backend import TorchBackend
from paceline.core.errors import CheckpointError
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from tests.unit.backend.tiny_models import write_model


def batch(seed: int) -> TrainBatch:
    def sequence(advantage: float) -> TrainSequence:
        return TrainSequence((1, 2, 3), [4, 5 + seed], [-1.0, -2.0], [1, 1], advantage)

    return TrainBatch([sequence(1.0), sequence(-0.5)], temperature=1.0)


def backend(path: str) -> TorchBackend:
    return TorchBackend(model_path=path, actor=ActorConfig(), seed=0)


def bits(one: TorchBackend) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in one.named_tensors()}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_restored_backend_makes_the_same_next_step(tmp_path: Path, steps: int) -> None:
    model = write_model("qwen3", tmp_path / "model")
    first = backend(model)
    for seed in range(steps):
        first.update(batch(seed))
    assert first.save_state(str(tmp_path))
    drawn = torch.rand(3)
    after = [first.update(batch(seed)) for seed in (7, 8)]
    second = backend(model)
    second.update(batch(9))
    second.load_state(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    assert [second.update(batch(seed)) for seed in (7, 8)] == after
    assert bits(first) == bits(second)


def test_weights_that_are_not_finite_are_said_to_be_so(tmp_path: Path) -> None:
    one = backend(write_model("qwen3", tmp_path / "model"))
    with torch.no_grad():
        next(tensor for _, tensor in one.named_tensors() if tensor.is_floating_point()).view(-1)[0] = torch.nan
    assert not one.save_state(str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    one = backend(write_model("qwen3", tmp_path / "model"))
    one.save_state(str(tmp_path))
    other = backend(write_model("llama", tmp_path / "wide"))
    before = bits(other)
    with pytest.raises(CheckpointError, match="of another model"):
        other.load_state(str(tmp_path))
    assert bits(other) == before
