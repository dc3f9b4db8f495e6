"""paceline: fully asynchronous RL post-training of language models. Public names, loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CheckpointEngineManager": "paceline.sync.checkpoint_engine_manager",
    "Config": "paceline.core.config",
    "FullyAsyncRollouter": "paceline.rollout.rollouter",
    "FullyAsyncTaskRunner": "paceline.runtime.task_runner",
    "FullyAsyncTrainer": "paceline.train.trainer",
    "LocalRuntime": "paceline.runtime.local_runtime",
    "MessageQueue": "paceline.message_queue",
    "PacelineError": "paceline.core.errors",
    "ParameterSynchronizer": "paceline.sync.parameter_synchronizer",
    "Replica": "paceline.rollout.replica",
    "SharedMemoryReceiver": "paceline.checkpoint_engine.shared_memory",
    "SharedMemorySender": "paceline.checkpoint_engine.shared_memory",
    "Version": "paceline.core.version",
    "VllmPusher": "paceline.runtime.vllm_push",
    "WeightManifest": "paceline.core.manifest",
    "WeightTransaction": "paceline.sync.weight_transaction",
    "build_config": "paceline.core.config",
}

__version__ = "0.1.0"
__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - a test holds it equal to the README


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
