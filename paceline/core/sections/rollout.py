"""`rollout.*`: replicas, sampling, and what happens when replicas fail."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.sections.section import Section


class RolloutConfig(Section):
    """`rollout.*`"""

    name: Literal["embedded"] = Field("embedded", description="Inference engine of the replicas.")
    num_replicas: int = Field(2, ge=1, description="Inference replicas, one process each.")
    nnodes: int = Field(
        1, ge=1, description="Nodes that replicas are spread over; not the trainer's where the cluster has others."
    )
    n: int = Field(8, ge=1, description="Responses per prompt.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of training rollouts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(-1, ge=-1, description="Sample among the k likeliest tokens; -1 is off.")
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
    max_pinned_versions: int = Field(1, ge=1, description="Versions kept for validations beside the two of a sync.")
