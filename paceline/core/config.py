"""The configuration: one frozen model per component, checked when it is built.

Unknown keys are errors (with the nearest known one), numbers that follow from others are properties, and a
combination that cannot work is refused here, before any process starts. Names and formulas that users of verl's
fully_async_policy know keep their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import Field, ValidationError, model_validator

from paceline.core.errors import ConfigError
from paceline.core.sections.actor import ActorConfig
from paceline.core.sections.algorithm import AlgorithmConfig
from paceline.core.sections.async_training import AsyncTrainingConfig
from paceline.core.sections.checkpoint_engine import CheckpointEngineConfig
from paceline.core.sections.data import DataConfig
from paceline.core.sections.model import ModelConfig
from paceline.core.sections.ray import RayConfig
from paceline.core.sections.reward import RewardConfig
from paceline.core.sections.rollout import RolloutConfig
from paceline.core.sections.section import Section
from paceline.core.sections.trainer import TrainerConfig
from paceline.core.verl_keys import verl_hint
from paceline.core.version import max_required_samples


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
    ray: RayConfig = Field(default_factory=RayConfig)

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
        """Copies of the weights in a node's memory: shared by all replicas, or as many in each; where they are sent
        elsewhere, also those that the trainer fills, and with deltas two in each replica, which builds versions there.
        """
        engine = self.checkpoint_engine
        if engine.backend == "shared_memory":
            return self.arenas
        filled = 1 if engine.mode == "full" else 2  # a delta needs its base
        if engine.backend == "filesystem":
            validators = 1 if self.async_training.use_trainer_do_validate else 0
            return filled + self.arenas * self.rollout.num_replicas + validators
        return self.arenas + filled + (0 if engine.mode == "full" else 2 * self.rollout.num_replicas)

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
        overlong = self.reward.overlong_buffer
        if overlong.enable and overlong.len > self.data.max_response_length:
            raise ValueError(
                f"reward.overlong_buffer.len={overlong.len} is more than "
                f"data.max_response_length={self.data.max_response_length}"
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
        if self.rollout.name == "vllm" and engine.backend == "ray_object":
            raise ValueError(
                "checkpoint_engine.backend=ray_object does not reach the workers of rollout.name=vllm: use "
                "shared_memory (on the trainer's node) or filesystem"
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


# Their values are mappings of the user's own.
OPEN_KEYS = ("data.apply_chat_template_kwargs", "reward.reward_kwargs", "rollout.engine_kwargs.vllm")


def known_keys() -> dict[str, Any]:
    """Every dotted key with its default, in order."""
    return _flatten(Config().model_dump(), "")


def _flatten(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in OPEN_KEYS:
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


def near_keys(key: str) -> list[str]:
    """Known keys that `key` may have been meant to be, the nearest first."""
    keys = list(known_keys())
    same_name = [known for known in keys if known.endswith("." + key.rsplit(".", maxsplit=1)[-1])]
    return get_close_matches(key, keys, n=3, cutoff=0.5) or same_name[:1]


def _unknown_key(key: str) -> str:
    migrated = verl_hint(key)
    if migrated is not None:
        return f"unknown key {key}; {migrated}"
    near = near_keys(key)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key}{hint}"
