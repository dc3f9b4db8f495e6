"""`reward.*`: how responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class CustomRewardFunctionConfig(Section):
    """`reward.custom_reward_function.*`"""

    path: str | None = Field(
        None,
        description="Python file with def or async def compute_score(data_source, solution_str, ground_truth, "
        "extra_info, **reward_kwargs), which returns a number or a dict with score; none: reward.name counts.",
    )
    name: str = Field("compute_score", min_length=1, description="Name of the function in the file.")


class OverlongBufferConfig(Section):
    """`reward.overlong_buffer.*`: DAPO's soft punishment of responses that come near to the length limit."""

    enable: bool = Field(
        False, description="Take reward from responses that reach into the last `len` tokens before the limit."
    )
    len: int = Field(2, ge=1, description="Tokens before data.max_response_length over which the penalty grows.")
    penalty_factor: float = Field(
        1.0, gt=0, description="The penalty of a response of data.max_response_length tokens."
    )


class RewardConfig(Section):
    """`reward.*`"""

    name: Literal["arithmetic", "math_verify", "reasoning_gym"] | None = Field(
        None, description="Built-in scorer; none: the one of the task, where it is embedded or of reasoning-gym."
    )
    custom_reward_function: CustomRewardFunctionConfig = Field(default_factory=CustomRewardFunctionConfig)
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the custom reward function."
    )
    timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="Longest time for one reward, retries included; a slower one fails its own sample "
        "(rollout.group_policy).",
    )
    num_workers: int = Field(
        8,
        ge=1,
        description="Rewards computed at the same time; a def function has so many processes at most, and one more for "
        "each call that has taken a quarter of its deadline.",
    )
    retry_attempts: int = Field(
        3, ge=1, description="How often a reward function is called in all when it fails with a network error."
    )
    retry_wait_seconds: float = Field(
        1.0, ge=0, description="Wait before the second call; it doubles with each further one."
    )

    @model_validator(mode="after")
    def _one_function(self) -> RewardConfig:
        custom = self.custom_reward_function.path is not None
        if custom and self.name is not None:
            raise ValueError(f"reward.name={self.name} and reward.custom_reward_function.path: set one of them")
        if self.reward_kwargs and not custom:
            raise ValueError("reward.reward_kwargs are for reward.custom_reward_function.path, which is not set")
        return self
