"""`rollout.*`: replicas, sampling, and what happens when replicas fail."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class ValKwargsConfig(Section):
    """`rollout.val_kwargs.*`"""

    n: int = Field(1, ge=1, description="Responses per validation prompt.")
    do_sample: bool = Field(False, description="Draw validation responses; false: greedy, whatever temperature says.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of validations that draw.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling of validations that draw; 1 is off.")
    top_k: int = Field(-1, ge=-1, description="Validations that draw do so among the k likeliest tokens; -1 is off.")

    @model_validator(mode="after")
    def _different(self) -> ValKwargsConfig:
        if self.n > 1 and not self.do_sample:
            raise ValueError(f"n={self.n} greedy responses are all the same: set do_sample=true, or n=1")
        if self.do_sample and self.temperature == 0:
            raise ValueError("do_sample=true needs a temperature above 0")
        return self


class RolloutEngineKwargs(Section):
    """`rollout.engine_kwargs.*`"""

    vllm: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's engine, as it names them (rollout.name=vllm)."
    )


class RolloutConfig(Section):
    """`rollout.*`"""

    name: Literal["embedded", "vllm"] = Field("embedded", description="Inference engine of the replicas.")
    servers: tuple[str, ...] = Field(
        (), description="URLs of vLLM servers started elsewhere; each is one replica (rollout.name=vllm)."
    )
    server_api_key_env: str = Field(
        "PACELINE_SERVER_API_KEY", description="Environment variable with the API key of `servers`; unset: none."
    )
    server_wait_seconds: float = Field(
        10.0, gt=0, description="How long requests of others on `servers` may take to end before a swap cuts them."
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Workers that share one replica's model (rollout.name=vllm)."
    )
    engine_kwargs: RolloutEngineKwargs = Field(
        default_factory=RolloutEngineKwargs, description="Options of one engine each."
    )
    num_replicas: int = Field(2, ge=1, description="Inference replicas, one process each.")
    nnodes: int = Field(
        1, ge=1, description="Nodes that replicas are spread over; not the trainer's where the cluster has others."
    )
    n: int = Field(8, ge=1, description="Responses per prompt.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of training rollouts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(-1, ge=-1, description="Sample among the k likeliest tokens; -1 is off.")
    val_kwargs: ValKwargsConfig = Field(default_factory=ValKwargsConfig)
    max_num_seqs: int = Field(128, ge=1, description="Sequences that one replica decodes at the same time.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the weights that replicas serve.")
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute", description="What a swap does to the KV cache of sequences in flight."
    )
    total_rollout_steps: int = Field(7680, ge=1, description="Samples (prompts) that the run generates in all.")
    exchange_timeout_seconds: float = Field(
        60.0, gt=0, description="Longest time without an answer after which a replica counts as lost."
    )
    max_replica_restarts: int = Field(2, ge=0, description="How often a replica whose process died is started again.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of a prompt and its response together; none: the sum of both limits."
    )
    drain_timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="How long a sequence may go on under the version before (partial_rollout=false); then it is begun "
        "again under the new one.",
    )
    replica_return_seconds: float = Field(
        60.0, gt=0, description="How long a run without any replica waits for one to come back before it fails."
    )
    max_sample_losses: int = Field(
        3, ge=1, description="A sample whose replica was lost this many times is set aside as failed."
    )
    group_policy: Literal["retry", "survivors"] = Field(
        "retry",
        description="What becomes of a prompt's responses when one of them cannot be made (refused, lost too often, "
        "out of time) or has no reward: retry gives them all up and takes another prompt; survivors goes on with those "
        "that are there, if there are at least two.",
    )
    sample_timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="Longest time that a sample may be in flight; then what it lacks is aborted; none: no limit.",
    )
    max_pinned_versions: int = Field(1, ge=1, description="Versions kept for validations beside the two of a sync.")

    @model_validator(mode="after")
    def _servers(self) -> RolloutConfig:
        if self.name != "vllm" and (self.servers or self.tensor_parallel_size > 1 or self.engine_kwargs.vllm):
            raise ValueError("servers, tensor_parallel_size and engine_kwargs.vllm need rollout.name=vllm")
        if self.servers and len(self.servers) != self.num_replicas:
            raise ValueError(
                f"each of the {len(self.servers)} servers is one replica: set rollout.num_replicas={len(self.servers)}"
            )
        if self.servers and self.kv_cache == "keep":
            raise ValueError("kv_cache=keep is not possible with servers: requests go on there as new ones")
        strange = [url for url in self.servers if not url.startswith(("http://", "https://"))]
        if strange:
            raise ValueError(f"servers: {strange[0]!r} is not a URL such as http://127.0.0.1:8000")
        return self
