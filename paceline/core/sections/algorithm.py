"""`algorithm.*`: from rewards to advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`: DAPO's dynamic sampling."""

    enable: bool = Field(
        False, description="Drop samples whose responses all have the same reward, and generate others in their place."
    )


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction.*`: for tokens that older weights, or another program, sampled."""

    bypass_mode: bool = Field(
        True,
        description="The loss compares with the log-probs of the rollout; false: with those of a proximal policy, the "
        "weights of the last sync, computed by the trainer (decoupled PPO).",
    )
    rollout_is: Literal["token", "sequence"] | None = Field(
        None,
        description="Truncated importance weights, proximal policy to rollout, per token or per sequence; none: no "
        "weights. Needs bypass_mode=false.",
    )
    rollout_is_threshold: float = Field(2.0, gt=0, description="Largest importance weight.")
    rollout_rs: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="Which ratio (per token, product over the sequence, its geometric mean) takes tokens out of the "
        "loss when it is out of bounds; none: no bounds.",
    )
    rollout_rs_threshold: float | None = Field(
        None, gt=0, description="Upper bound of that ratio; none: rollout_is_threshold."
    )
    rollout_rs_threshold_lower: float | None = Field(
        None, ge=0, description="Lower bound of that ratio; none: 1 / the upper one."
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of `rollout_rs`."""
        upper = self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold
        lower = self.rollout_rs_threshold_lower
        return (1.0 / upper if lower is None else lower), upper

    @model_validator(mode="after")
    def _possible(self) -> RolloutCorrectionConfig:
        if self.bypass_mode and self.rollout_is is not None:
            raise ValueError(
                f"rollout_is={self.rollout_is} needs bypass_mode=false: in bypass mode the clipped ratio is already "
                "taken against the rollout's log-probs"
            )
        lower, upper = self.bounds
        if self.rollout_rs is not None and lower >= upper:
            raise ValueError(
                f"rollout_rs accepts no ratio between {lower:g} and {upper:g}: "
                "rollout_rs_threshold_lower has to be less than rollout_rs_threshold"
            )
        return self


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)

    adv_estimator: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="How rewards of a group become advantages."
    )
