"""The configuration: one frozen model per component, checked when it is built.

Unknown keys are errors (with the nearest known one), numbers that follow from others are properties, and a
combination that cannot work is refused here, before any process starts. Names and formulas that users of verl's
fully_async_policy know keep their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from paceline.core.config_section import Section
from paceline.core.errors import ConfigError
from paceline.core.trainer_config import TrainerConfig
from paceline.core.version import max_required_samples


class ModelConfig(Section):
    """`model.*`"""

    path: str | None = Field(
        None, description="Directory of a Hugging Face causal LM; none: the model that paceline ships."
    )


class DataConfig(Section):
    """`data.*`"""

    seed: int = Field(0, ge=0, description="Seed of the order in which training prompts are drawn.")
    val_size: int = Field(2000, ge=1, description="Problems per validation.")
    max_prompt_length: int = Field(
        16, ge=1, description="Longest prompt, in tokens; a longer one is refused at the start."
    )
    max_response_length: int = Field(8, ge=1, description="Most tokens of a response.")


class OptimConfig(Section):
    """`actor.optim.*`: AdamW on fp32 master weights."""

    lr: float = Field(3e-5, ge=0, description="Learning rate after the warm-up.")
    lr_warmup_steps: int = Field(5, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decay rates.")


class ActorConfig(Section):
    """`actor.*`"""

    ppo_mini_batch_size: int = Field(
        64, ge=1, description="Samples (prompts with their responses) per optimiser update."
    )
    ppo_micro_batch_tokens: int = Field(
        16384, ge=16, description="Most tokens (padding included) of one forward and backward pass."
    )
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="The probability ratio is clipped below 1 minus this.")
    clip_ratio_high: float = Field(0.28, gt=0, description="The probability ratio is clipped above 1 plus this.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        "token-mean", description="How per-token losses become one number."
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    optim: OptimConfig = Field(default_factory=OptimConfig)


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`: DAPO's dynamic sampling."""

    enable: bool = Field(
        False, description="Drop samples whose responses all have the same reward, and generate others in their place."
    )


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)

    adv_estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="How rewards of a group become advantages."
    )


class RewardConfig(Section):
    """`reward.*`"""

    timeout_seconds: float = Field(
        30.0, gt=0, description="Longest time for one reward; a slower one fails its own sample."
    )
    num_workers: int = Field(64, ge=1, description="Samples that are scored at the same time.")


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


class AsyncTrainingConfig(Section):
    """`async_training.*`"""

    staleness_threshold: float = Field(
        0.5,
        ge=0,
        description="Admission budget: samples beyond on-policy, as a share of those that one version consumes.",
    )
    trigger_parameter_sync_step: int = Field(2, ge=1, description="Updates between two weight syncs.")
    require_batches: int = Field(
        1, ge=1, description="Mini-batches that the trainer collects before it starts an update."
    )
    max_version_lag: int | None = Field(
        None, ge=0, description="Largest version lag of a trained token; none: no bound but the staleness budget."
    )
    max_version_lag_policy: Literal["wait", "mask", "drop"] = Field(
        "wait", description="What happens to tokens beyond max_version_lag."
    )
    partial_rollout: bool = Field(
        True,
        description="Sequences in flight go on under new weights; false: each ends under the version it began with.",
    )

    @property
    def lag_policy(self) -> Literal["wait", "mask", "drop"] | None:
        """The policy in force, None without a bound."""
        return None if self.max_version_lag is None else self.max_version_lag_policy


class FilesystemKwargs(Section):
    """`checkpoint_engine.engine_kwargs.filesystem.*`"""

    url: str | None = Field(
        None,
        description="Root of the versions: an absolute path or a URL that fsspec knows; empty or of an earlier run.",
    )
    keep: int = Field(4, ge=2, description="Versions that stay readable, the newest included.")
    keep_seconds: float = Field(30.0, ge=0, description="A version stays at least this long after it was published.")
    shard_megabytes: int = Field(256, ge=1, description="Most MiB of data per file; a larger tensor has its own file.")

    @model_validator(mode="after")
    def _absolute(self) -> FilesystemKwargs:
        # Every process of a run opens it, each with a working directory of its own.
        if self.url is not None and not (self.url.startswith("/") or "://" in self.url):
            raise ValueError(f"url={self.url} has to be an absolute path or a URL")
        return self


class SharedMemoryKwargs(Section):
    """`checkpoint_engine.engine_kwargs.shared_memory.*`"""

    arena: Literal["memfd", "file"] = Field(
        "memfd",
        description="What versions lie in: sealed memory, or nameless files in the run's private directory.",
    )


class EngineKwargs(Section):
    """`checkpoint_engine.engine_kwargs.*`: options of one backend each."""

    shared_memory: SharedMemoryKwargs = Field(
        default_factory=SharedMemoryKwargs, description="Options of checkpoint_engine.backend=shared_memory."
    )
    filesystem: FilesystemKwargs = Field(
        default_factory=FilesystemKwargs, description="Options of checkpoint_engine.backend=filesystem."
    )


class CheckpointEngineConfig(Section):
    """`checkpoint_engine.*`"""

    backend: Literal["shared_memory", "ray_object", "filesystem"] = Field(
        "shared_memory", description="How published weights reach a replica."
    )
    engine_kwargs: EngineKwargs = Field(default_factory=EngineKwargs, description="Options of the backends.")
    verify: Literal["full", "changed", "off"] = Field(
        "full",
        description="What is hashed of a staged version before it is served: all, or (after a replica's first version, "
        "shared_memory only) the tensors whose digest has changed, or nothing.",
    )
    nonfinite: Literal["error", "skip", "off"] = Field(
        "error",
        description="What a NaN or infinity in captured weights does: end the run, skip this sync (the version is not "
        "raised), or nothing.",
    )
    name_rules: tuple[tuple[str, str], ...] = Field(
        (),
        description="Rewrites from the trainer's names to the engine's, in order: a prefix ('module.', '') or a "
        "component ('.base_layer', '').",
    )
    trainer_only: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that the engine has no use for, for example 'value_head.*'."
    )
    engine_static: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) of the engine that the trainer never sends."
    )
    keep: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that are sent in their own type whatever rollout.dtype is."
    )
    any_value: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that may hold NaN and infinity, whatever `nonfinite` says."
    )
    update_order: Literal["all", "rolling"] = Field(
        "all", description="Whether replicas swap all at once, or `rolling_size` at a time while the others generate."
    )
    rolling_size: int = Field(1, ge=1, description="Replicas that swap at the same time under update_order=rolling.")
    sync_timeout_seconds: float = Field(60.0, gt=0, description="Deadline of each phase of a sync.")
    sync_attempts: int = Field(
        3, ge=1, description="How often an aborted sync is tried, each time with a new version, before the run fails."
    )

    @property
    def guard(self) -> Literal["error", "off"]:
        """What the sender does about non-finite values; `skip` is the synchronizer's way to take its error."""
        return "off" if self.nonfinite == "off" else "error"

    @model_validator(mode="after")
    def _names(self) -> CheckpointEngineConfig:
        for old, _ in self.name_rules:
            if len(old) < 2 or old.startswith(".") == old.endswith("."):
                raise ValueError(f"name_rules: {old!r} is neither a prefix ('module.') nor a component ('.base_layer')")
        if self.verify == "changed" and self.backend != "shared_memory":
            raise ValueError(f"verify=changed is not possible with backend={self.backend}, which reads every byte anew")
        return self

    @property
    def swaps_at_once(self) -> int | None:
        """Most replicas that may swap at the same time; None: no bound."""
        return self.rolling_size if self.update_order == "rolling" else None


class Config(Section):
    """The whole configuration of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    async_training: AsyncTrainingConfig = Field(default_factory=AsyncTrainingConfig)
    checkpoint_engine: CheckpointEngineConfig = Field(default_factory=CheckpointEngineConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @property
    def required_samples(self) -> int:
        """Samples of one update: `ppo_mini_batch_size * require_batches`."""
        return self.actor.ppo_mini_batch_size * self.async_training.require_batches

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.rollout.max_model_len or self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_required_samples(self) -> int:
        """Samples that may be admitted in one version's window (exact arithmetic)."""
        return max_required_samples(
            self.required_samples,
            self.async_training.staleness_threshold,
            self.async_training.trigger_parameter_sync_step,
        )

    @property
    def total_steps(self) -> int:
        """Updates of the run: whole batches in `rollout.total_rollout_steps`."""
        return self.rollout.total_rollout_steps // self.required_samples

    @property
    def arenas(self) -> int:
        """Arenas per node: two of a sync, the pins, and one for sequences that end under their own version."""
        return 2 + self.rollout.max_pinned_versions + (0 if self.async_training.partial_rollout else 1)

    @property
    def weight_copies(self) -> int:
        """Copies of the weights in a node's memory: shared by all replicas (and with `ray_object` one that the trainer
        fills), or as many in each.
        """
        if self.checkpoint_engine.backend == "filesystem":
            return self.arenas * self.rollout.num_replicas
        return self.arenas + (1 if self.checkpoint_engine.backend == "ray_object" else 0)

    @model_validator(mode="after")
    def _whole(self) -> Config:
        if self.total_steps < 1:
            raise ValueError(
                f"rollout.total_rollout_steps={self.rollout.total_rollout_steps} is less than one update needs: "
                f"actor.ppo_mini_batch_size * async_training.require_batches = {self.required_samples}"
            )
        if self.max_model_len <= self.data.max_prompt_length:
            raise ValueError(
                f"rollout.max_model_len={self.max_model_len} leaves no room for a response after "
                f"data.max_prompt_length={self.data.max_prompt_length}"
            )
        if self.rollout.n == 1 and self.algorithm.adv_estimator in ("grpo", "rloo"):
            raise ValueError(
                f"algorithm.adv_estimator={self.algorithm.adv_estimator} compares the responses of a prompt: "
                "rollout.n must be at least 2"
            )
        if (self.trainer.resume_mode == "resume_path") != (self.trainer.resume_from_path is not None):
            raise ValueError(
                "trainer.resume_mode=resume_path and trainer.resume_from_path go together: set both or none"
            )
        engine = self.checkpoint_engine
        if engine.backend == "filesystem" and engine.engine_kwargs.filesystem.url is None:
            raise ValueError(
                "checkpoint_engine.backend=filesystem needs a place: set checkpoint_engine.engine_kwargs.filesystem.url"
            )
        nodes = self.rollout.nnodes
        if nodes > 1 and engine.backend == "shared_memory":
            raise ValueError(
                f"checkpoint_engine.backend=shared_memory serves the trainer's node alone: rollout.nnodes={nodes} "
                "needs ray_object or filesystem"
            )
        if nodes > self.rollout.num_replicas:
            raise ValueError(f"rollout.nnodes={nodes} is more than rollout.num_replicas={self.rollout.num_replicas}")
        return self


def known_keys() -> dict[str, Any]:
    """Every dotted key with its default, in order."""
    return _flatten(Config().model_dump(), "")


def _flatten(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{key}."))
        else:
            flat[key] = value
    return flat


def build_config(tree: Mapping[str, Any]) -> Config:
    """Check a nested mapping and build the configuration.

    Raises:
        ConfigError: one line that names the key, what is wrong, and for an unknown key the nearest known one.
    """
    known = known_keys()
    for key in _flatten(tree, ""):
        if key not in known:
            raise ConfigError(_unknown_key(key))
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = str(first["msg"]).removeprefix("Value error, ")
        got = "" if not where else f" (got {first['input']!r})"
        raise ConfigError(f"{where + ': ' if where else ''}{what[:1].lower() + what[1:]}{got}") from error


def _unknown_key(key: str) -> str:
    keys = list(known_keys())
    same_name = [known for known in keys if known.endswith("." + key.rsplit(".", maxsplit=1)[-1])]
    near = get_close_matches(key, keys, n=1, cutoff=0.5) or same_name[:1]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key}{hint}"
