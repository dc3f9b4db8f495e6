"""Replicas whose engine is a server: what `rollout.name=vllm` and `rollout.servers` stand for.

Everything heavy is imported when it is built; vLLM itself only inside its adapter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.core.config import Config
from paceline.core.errors import ConfigError
from paceline.core.events import EventSink
from paceline.core.server_ports import InferenceServer
from paceline.engine.vllm_commands import INSTALL, Hello, ReceiverSpec, version_of_label
from paceline.engine.vllm_control import VllmWeights
from paceline.rollout.served_replica import ServedReplica
from paceline.runtime.registry import build_journal
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import SystemClock


def is_served(config: Config) -> bool:
    """Whether the replicas' engine is a server."""
    return config.rollout.name == "vllm"


def check_serving(config: Config) -> None:
    """Refuse, before anything starts, what this installation cannot serve.

    Raises:
        ConfigError: vLLM is wanted here, but is not installed.
    """
    if not is_served(config) or config.rollout.servers:
        return
    if find_spec("vllm") is None:
        raise ConfigError(INSTALL)


def build_served_replica(
    spec: RunSpec, replica_id: str, server: InferenceServer, clock: SystemClock, events: EventSink
) -> ServedReplica:
    """The loop over one server."""
    return ServedReplica(
        replica_id=replica_id,
        life=spec.life,
        server=server,
        read_label=version_of_label,
        partial_rollout=spec.config.async_training.partial_rollout,
        drain_seconds=spec.config.rollout.drain_timeout_seconds,
        clock=clock,
        events=events,
        journal=build_journal(spec, replica_id),
    )


def build_server(spec: RunSpec, replica_id: str, threads: int) -> InferenceServer:
    """The server of a replica: one of `rollout.servers`, or a vLLM engine of its own."""
    config = spec.config
    clock = SystemClock()
    number = int(replica_id.rpartition("-")[2])
    if config.rollout.servers:
        from paceline.engine.vllm_http import VllmHttpServer

        return VllmHttpServer(
            config.rollout.servers[number],
            name=replica_id,
            clock=clock,
            make_weights=weights_maker(config, replica_id, clock),
            hello=hello_of(spec),
            api_key=os.environ.get(config.rollout.server_api_key_env),
            call_seconds=config.checkpoint_engine.sync_timeout_seconds,
            wait_seconds=config.rollout.server_wait_seconds,
            max_model_len=config.max_model_len,
        )
    from paceline.engine.vllm_async import VllmEngine, VllmOptions

    options = VllmOptions(
        model=spec.model_path,
        dtype=config.rollout.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        kv_cache=config.rollout.kv_cache,
        seed=config.trainer.seed * 1000 + number + 7919 * spec.life,
        threads=threads,
        socket_dir=spec.private_dir,
        call_seconds=config.checkpoint_engine.sync_timeout_seconds,
        place=number // config.rollout.nnodes,  # replicas are dealt out to the nodes in turn
        further=config.rollout.engine_kwargs.vllm,
    )
    return VllmEngine(
        options,
        name=replica_id,
        clock=clock,
        hello=hello_of(spec),
        make_weights=weights_maker(config, replica_id, clock),
    )


def weights_maker(config: Config, name: str, clock: SystemClock) -> Callable[[Any], VllmWeights]:
    """Makes what drives a server's weights through its calls."""
    engine = config.checkpoint_engine
    receiver = ReceiverSpec(
        backend="filesystem" if engine.backend == "filesystem" else "shared_memory",
        verify=engine.verify,
        deadline_seconds=engine.sync_timeout_seconds,
        url=engine.engine_kwargs.filesystem.url or "",
    )
    return lambda calls: VllmWeights(
        calls,
        name=name,
        receiver=receiver,
        clock=clock,
        name_rules=engine.name_rules,
        trainer_only=engine.trainer_only,
    )


def hello_of(spec: RunSpec) -> Hello:
    """What a server's model has to be: that of the trainer."""
    described = json.loads((Path(spec.model_path) / "config.json").read_text(encoding="utf-8"))
    rollout = spec.config.rollout
    # Only where nothing is cut and nothing scaled are the model's own log-probs those that tokens are drawn with.
    plain = (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    return Hello(
        model_type=str(described.get("model_type", "")),
        dtype=rollout.dtype,
        logprobs_mode="" if plain else "processed_logprobs",
    )
