"""`async_training.*`: how far generation may run ahead of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.sections.section import Section


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
    use_trainer_do_validate: bool = Field(
        False,
        description="The trainer's side evaluates its share of a validation, in a process of its own beside the "
        "trainer; false: the replicas evaluate all of it.",
    )

    @property
    def lag_policy(self) -> Literal["wait", "mask", "drop"] | None:
        """The policy in force, None without a bound."""
        return None if self.max_version_lag is None else self.max_version_lag_policy
