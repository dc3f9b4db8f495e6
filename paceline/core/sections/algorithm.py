"""`algorithm.*`: from rewards to advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.sections.section import Section


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
