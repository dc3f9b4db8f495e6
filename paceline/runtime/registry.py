"""Which class serves which port: the only place that branches on kinds.

Every function imports what it builds when it is called, so that a light process (queue, synchronizer, rollouter)
never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from paceline.core.config import Config
from paceline.core.errors import ConfigError
from paceline.core.ports import (
    InferenceEngine,
    PromptSource,
    RewardFn,
    ServingBoard,
    TrainBackend,
    WeightReceiver,
    WeightSender,
)
from paceline.core.sample import Prompt
from paceline.runtime.spec import RunSpec
from paceline.task.arithmetic import Problem, problems
from paceline.tokenizer.fast_tokenizer import FastTokenizer


def model_path(config: Config) -> Path:
    """Directory of the model: `model.path`, or the one that the package ships.

    Raises:
        ConfigError: it is no Hugging Face model directory.
    """
    path = (
        Path(config.model.path) if config.model.path else Path(str(resources.files("paceline"))) / "assets/tiny_model"
    )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a Hugging Face model directory (it has no config.json)")
    return path.absolute()


def build_tokenizer(spec: RunSpec) -> FastTokenizer:
    """The model's tokenizer, without transformers."""
    return FastTokenizer(spec.model_path)


def check_prompts(config: Config) -> None:
    """Refuse, before anything starts, what `build_prompts` would refuse.

    Raises:
        ConfigError: as `build_prompts`.
    """
    build_prompts(config, FastTokenizer(str(model_path(config))))


def build_prompts(config: Config, tokenizer: FastTokenizer) -> PromptSource:
    """The embedded arithmetic task.

    Raises:
        ConfigError: a prompt is longer than `data.max_prompt_length`, or validation has fewer problems than asked for.
    """
    from paceline.rollout.prompt_dataset import PromptDataset

    data = config.data
    validation = problems("validation")
    if data.val_size > len(validation):
        raise ConfigError(f"data.val_size: the arithmetic task has {len(validation)} validation problems")
    return PromptDataset(
        train=_as_prompts(problems("train"), tokenizer, data.max_prompt_length),
        validation=_as_prompts(validation[: data.val_size], tokenizer, data.max_prompt_length),
        seed=data.seed,
    )


def _as_prompts(chosen: Sequence[Problem], tokenizer: FastTokenizer, longest: int) -> list[Prompt]:
    prompts = [
        Prompt(
            prompt_id=problem.problem_id,
            text=problem.prompt,
            token_ids=tuple(tokenizer.encode(problem.prompt)),
            ground_truth=problem.answer,
            data_source="arithmetic",
        )
        for problem in chosen
    ]
    too_long = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if len(too_long.token_ids) > longest:
        raise ConfigError(
            f"data.max_prompt_length: {too_long.text!r} has {len(too_long.token_ids)} tokens, more than {longest}"
        )
    return prompts


def build_reward(spec: RunSpec) -> RewardFn:
    """The scorer of the embedded task."""
    from paceline.reward.arithmetic_reward import ArithmeticReward

    return ArithmeticReward()


def build_backend(spec: RunSpec, threads: int) -> TrainBackend:
    """The train backend; sets this process's torch threads."""
    import torch

    from paceline.backend.torch_backend import TorchBackend

    torch.set_num_threads(threads)
    return TorchBackend(model_path=spec.model_path, actor=spec.config.actor, seed=spec.config.trainer.seed)


def build_sender(spec: RunSpec, threads: int) -> WeightSender:
    """The trainer's end of `checkpoint_engine.backend`."""
    from paceline.checkpoint_engine.shared_memory import SharedMemorySender

    config = spec.config
    return SharedMemorySender(
        directory=spec.private_dir,
        arenas=config.arenas,
        dtype=config.rollout.dtype,
        nonfinite=config.checkpoint_engine.nonfinite,
        threads=threads,
    )


def build_receiver(spec: RunSpec, replica_id: str) -> WeightReceiver:
    """A replica's end of `checkpoint_engine.backend`."""
    from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver

    engine = spec.config.checkpoint_engine
    return SharedMemoryReceiver(holder=replica_id, verify=engine.verify, deadline_seconds=engine.sync_timeout_seconds)


def build_board(spec: RunSpec, replica_id: str) -> ServingBoard:
    """Where a replica tells outside processes what it serves."""
    from paceline.store.serving_table import FileServingBoard

    return FileServingBoard(directory=str(spec.serving_dir), replica_id=replica_id)


def engine_factory(spec: RunSpec, replica_id: str, threads: int) -> Callable[[], InferenceEngine]:
    """Makes engines of `rollout.name`; sets this process's torch threads."""
    import torch

    from paceline.engine.embedded_engine import EmbeddedEngine

    torch.set_num_threads(threads)
    config = spec.config
    seed = config.trainer.seed * 1000 + int(replica_id.rpartition("-")[2])
    made = 0

    def make() -> InferenceEngine:
        nonlocal made
        made += 1
        return EmbeddedEngine(
            model_config_dir=spec.model_path,
            dtype=config.rollout.dtype,
            max_num_seqs=config.rollout.max_num_seqs,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            kv_cache=config.rollout.kv_cache,
            seed=seed + 500 * (made - 1),
        )

    return make
