"""One worker's model as vLLM builds it, before a CPU packs its weights: what a GPU has. Run as RANK SIZE PORT.

Prints as JSON what the plan of its parameters can do: whether it is proved, with how many groups, how many elements
were written, how many differ between two versions that vLLM has loaded, and how many still do after writing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from paceline.engine.slot_writer import SlotWriter
from paceline.engine.vllm_model import VllmModel
from tests.vllm.fleet import shipped_model

Tensors = dict[str, torch.Tensor]


def engine_config(size: int) -> Any:
    """A new one for each model: vLLM registers layers in it by name."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=shipped_model(),
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else "uni",
    )
    return arguments.create_engine_config()


def build(config: Any) -> Any:
    """An empty model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config=config)


def join(config: Any, rank: int, size: int, port: int) -> None:
    """Be one of the workers."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(size, 1)


def watched_model(config: Any, tensors: Tensors) -> VllmModel:
    """A model as vLLM starts with it (packed), into which a version has been loaded: its layers are known then."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = build(config)
    model.load_weights(tensors.items())
    watched = VllmModel(model, config.model_config)
    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        watched.load_all(tensors.items())
    return watched


def two_versions() -> tuple[Tensors, Tensors]:
    """The shipped weights, and the same with one element in a hundred changed."""
    before = {name: t.to(torch.bfloat16) for name, t in load_file(f"{shipped_model()}/model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    after = {}
    for name, tensor in before.items():
        chosen = torch.rand(tensor.shape, generator=generator) < 0.01
        after[name] = torch.where(chosen, tensor * 1.5 + 0.25, tensor)
    return before, after


def parameters_of(model: Any) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def differing(some: Tensors, others: Tensors) -> int:
    pairs = [(some[name].view(torch.int16), others[name].view(torch.int16)) for name in some]
    return sum(int((one != other).sum()) for one, other in pairs)


def main(rank: int, size: int, port: int) -> dict[str, object]:
    """See above."""
    config = engine_config(size)
    join(config, rank, size, port)
    before, after = two_versions()
    watched = watched_model(config, before)
    model, fresh = build(engine_config(size)), build(engine_config(size))
    model.load_weights(before.items())
    fresh.load_weights(after.items())
    held = {name: parameter.detach().clone() for name, parameter in parameters_of(model).items()}
    groups = watched.groups(before.keys())
    writer = SlotWriter(parameters_of(model), model.load_weights, groups)
    proved = writer.learn(before)
    changes = writer.prepare(before, after, list(before))
    written = -1 if changes is None else writer.write(changes)
    right = {name: parameter.detach() for name, parameter in parameters_of(fresh).items()}
    now = {name: parameter.detach() for name, parameter in parameters_of(model).items()}
    return {
        "proved": proved,
        "groups": len(groups),
        "parameters": len(held),
        "written": written,
        "differ": differing(held, right),
        "left": differing(now, right),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
