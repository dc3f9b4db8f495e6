"""`reward.*`: how responses are scored."""

from __future__ import annotations

from pydantic import Field

from paceline.core.sections.section import Section


class RewardConfig(Section):
    """`reward.*`"""

    timeout_seconds: float = Field(
        30.0, gt=0, description="Longest time for one reward; a slower one fails its own sample."
    )
    num_workers: int = Field(64, ge=1, description="Samples that are scored at the same time.")
