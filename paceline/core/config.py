"""The configuration: one frozen model per component, checked when it is built.

Unknown keys are errors (with the nearest known one), numbers that follow from others are properties, and a
combination that cannot work is refused here, before any process starts. Names and formulas that users of verl's
fully_async_policy know keep their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.errors import ConfigError
from paceline.core.version import max_required_samples


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class ModelConfig(_Section):
    """`model.*`"""

    path: str | None = Field(
        None, description="Directory of a Hugging Face causal LM; none: the model that paceline ships."
    )


class DataConfig(_Section):
    """`data.*`"""

    seed: int = Field(0, ge=0, description="Seed of the order in which training prompts are drawn.")
    val_size: int = Field(2000, ge=1, description="Problems per validation.")
    max_prompt_length: int = Field(
        16, ge=1, description="Longest prompt, in tokens; a longer one is refused at the start."
    )
    max_response_length: int = Field(8, ge=1, description="Most tokens of a response.")


class OptimConfig(_Section):
    """`actor.optim.*`: AdamW on fp32 master weights."""

    lr: float = Field(3e-5, ge=0, description="Learning rate after the warm-up.")
    lr_warmup_steps: int = Field(5, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decay rates.")


class ActorConfig(_Section):
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


class FilterGroupsConfig(_Section):
    """`algorithm.filter_groups.*`: DAPO's dynamic sampling."""

    enable: bool = Field(
        False, description="Drop samples whose responses all have the same reward, and generate others in their place."
    )


class AlgorithmConfig(_Section):
    """`algorithm.*`"""

    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)

    adv_estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="How rewards of a group become advantages."
    )


class RewardConfig(_Section):
    """`reward.*`"""

    timeout_seconds: float = Field(
        30.0, gt=0, description="Longest time for one reward; a slower one fails its own sample."
    )
    num_workers: int = Field(64, ge=1, description="Samples that are scored at the same time.")


class RolloutConfig(_Section):
    """`rollout.*`"""

    name: Literal["embedded"] = Field("embedded", description="Inference engine of the replicas.")
    num_replicas: int = Field(2, ge=1, description="Inference replicas, one process each.")
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
    replica_return_seconds: float = Field(
        60.0, gt=0, description="How long a run without any replica waits for one to come back before it fails."
    )
    max_sample_losses: int = Field(
        3, ge=1, description="A sample whose replica was lost this many times is set aside as failed."
    )
    max_pinned_versions: int = Field(1, ge=1, description="Versions kept for validations beside the two of a sync.")


class AsyncTrainingConfig(_Section):
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


class FilesystemKwargs(_Section):
    """`checkpoint_engine.engine_kwargs.filesystem.*`"""

    url: str | None = Field(
        None,
        description="Root of the versions: an absolute path or a URL that fsspec knows; empty or of an earlier run.",
    )
    keep: int = Field(4, ge=2, description="Versions that stay readable, the newest included.")
    keep_seconds: float = Field(30.0, ge=0, description="A version stays at least this long after it was published.")
    shard_megabytes: int = Field(1024, ge=1, description="Most MiB of data per file; a larger tensor has its own file.")

    @model_validator(mode="after")
    def _absolute(self) -> FilesystemKwargs:
        # Every process of a run opens it, each with a working directory of its own.
        if self.url is not None and not (self.url.startswith("/") or "://" in self.url):
            raise ValueError(f"url={self.url} has to be an absolute path or a URL")
        return self


class SharedMemoryKwargs(_Section):
    """`checkpoint_engine.engine_kwargs.shared_memory.*`"""

    arena: Literal["memfd", "file"] = Field(
        "memfd",
        description="What versions lie in: sealed memory, or files without a name in the run's private directory.",
    )


class EngineKwargs(_Section):
    """`checkpoint_engine.engine_kwargs.*`: options of one backend each."""

    shared_memory: SharedMemoryKwargs = Field(
        default_factory=SharedMemoryKwargs, description="Options of checkpoint_engine.backend=shared_memory."
    )
    filesystem: FilesystemKwargs = Field(
        default_factory=FilesystemKwargs, description="Options of checkpoint_engine.backend=filesystem."
    )


class CheckpointEngineConfig(_Section):
    """`checkpoint_engine.*`"""

    backend: Literal["shared_memory", "filesystem"] = Field(
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
        description="Rewrites from the trainer's names to the engine's, in order: a prefix ('module.', '') or a component "
        "('.base_layer', '').",
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
    update_order: Literal["all", "rolling"] = Field(
        "all", description="Whether replicas swap all at once, or `rolling_size` at a time while the others generate."
    )
    rolling_size: int = Field(1, ge=1, description="Replicas that swap at the same time under update_order=rolling.")
    sync_timeout_seconds: float = Field(60.0, gt=0, description="Deadline of each phase of a sync.")

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


class TrainerConfig(_Section):
    """`trainer.*`"""

    seed: int = Field(0, ge=0, description="Seed of sampling and of anything random in the trainer.")
    test_freq: int = Field(5, ge=0, description="Versions between two validations; 0: only at the start and the end.")
    val_before_train: bool = Field(True, description="Validate the weights as they are before the first update.")
    project_name: str = Field("paceline", min_length=1, description="Name of the project, part of the run directory.")
    experiment_name: str = Field("arithmetic", min_length=1, description="Name of the run, part of the run directory.")
    default_local_dir: str = Field("runs", min_length=1, description="Directory below which run directories are made.")
    logger: tuple[Literal["console", "tensorboard"], ...] = Field(
        ("console", "tensorboard"), description="Where progress is shown besides the event log."
    )
    stall_timeout_seconds: float = Field(
        600.0,
        gt=0,
        description="Longest wait for samples, queue room or a validation before the run fails, naming who waited.",
    )


class Config(_Section):
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

    @model_validator(mode="after")
    def _whole(self) -> Config:
        if self.total_steps < 1:
            raise ValueError(
                f"rollout.total_rollout_steps={self.rollout.total_rollout_steps} is less than one update needs: "
                f"actor.ppo_mini_batch_size * async_training.require_batches = {self.required_samples}"
            )
        if self.rollout.n == 1 and self.algorithm.adv_estimator in ("grpo", "rloo"):
            raise ValueError(
                f"algorithm.adv_estimator={self.algorithm.adv_estimator} compares the responses of a prompt: "
                "rollout.n must be at least 2"
            )
        engine = self.checkpoint_engine
        if engine.backend == "filesystem" and engine.engine_kwargs.filesystem.url is None:
            raise ValueError(
                "checkpoint_engine.backend=filesystem needs a place: set checkpoint_engine.engine_kwargs.filesystem.url"
            )
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
    for key in _flatten(tree, ""):
        if key not in known_keys():
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
