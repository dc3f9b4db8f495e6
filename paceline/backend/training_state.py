"""The training state of one process as files: weights, AdamW's moments and steps, torch's random state.

`trainer.safetensors` has the tensors, `trainer.json` the number of optimiser steps. Law: a restored backend makes the
same next step, bit for bit, as the one that was saved. Nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError

TENSORS_FILE = "trainer.safetensors"
STEPS_FILE = "trainer.json"
RANDOM_STATE = "random_state"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class _Steps(msgspec.Struct, frozen=True):
    optimizer_steps: int


def save_training_state(model: nn.Module, optimizer: torch.optim.AdamW, steps: int, directory: Path) -> bool:
    """Write both files; returns whether weights and moments are finite."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in _stored(model).items()}
    for name, parameter in _trained(model, optimizer).items():
        for moment in MOMENTS:
            if moment in optimizer.state[parameter]:
                tensors[f"optimizer.{moment}.{name}"] = optimizer.state[parameter][moment]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())
    tensors[RANDOM_STATE] = torch.get_rng_state()
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, directory / TENSORS_FILE)
    (directory / STEPS_FILE).write_bytes(msgspec.json.encode(_Steps(steps)))
    return finite


def load_training_state(model: nn.Module, optimizer: torch.optim.AdamW, directory: Path) -> int:
    """Restore model, optimiser and random state in place; returns the number of optimiser steps.

    Raises:
        CheckpointError: the tensors are not those of this model; nothing has changed.
    """
    tensors = load_file(directory / TENSORS_FILE)
    steps = msgspec.json.decode((directory / STEPS_FILE).read_bytes(), type=_Steps).optimizer_steps
    stored = _stored(model)
    _check_same({f"model.{name}": tensor for name, tensor in stored.items()}, tensors)
    trained = _trained(model, optimizer)
    with torch.no_grad():
        for name, tensor in stored.items():
            tensor.copy_(tensors[f"model.{name}"])
    for name, parameter in trained.items():
        saved = {moment: tensors.get(f"optimizer.{moment}.{name}") for moment in MOMENTS}
        present = {moment: tensor for moment, tensor in saved.items() if tensor is not None}
        # The step count of a fused AdamW is a float32 tensor beside the parameter, as its moments are.
        optimizer.state[parameter] = {moment: tensor.to(parameter.device) for moment, tensor in present.items()}
    torch.set_rng_state(tensors[RANDOM_STATE])
    return steps


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones once, under their first name."""
    persistent = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, tensor in persistent.items():
        names.setdefault(id(tensor), name)
    return {name: persistent[name] for name in names.values()}


def _trained(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, nn.Parameter]:
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in mine}


def _check_same(expected: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in saved or (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    wrong += [name for name in saved if name.startswith("model.") and name not in expected]
    if wrong:
        names = ", ".join(sorted(wrong)[:8])
        raise CheckpointError(f"the checkpoint is of another model: {len(wrong)} tensors differ, among them {names}")
