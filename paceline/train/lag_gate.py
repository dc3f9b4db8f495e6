"""LagGate: what the trainer does about `async_training.max_version_lag`, by its policy.

The arithmetic is in `train.staleness`.

The gate knows which samples this trainer has consumed since it last asked, so that the rollouter can tell which of the
others are still on their way and how old they may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.ports import SampleSource
from paceline.core.sample import Response, Sample
from paceline.core.sections.async_training import AsyncTrainingConfig
from paceline.core.version import Lineage, Version
from paceline.train import staleness


class LagGate:
    """The bound and its policy; `source` is the rollouter."""

    def __init__(self, config: AsyncTrainingConfig, source: SampleSource, lineage: Lineage) -> None:
        self._bound = config.max_version_lag
        self._policy = config.lag_policy
        self._source = source
        self._lineage = lineage
        self._consumed: list[str] = []

    async def urgent_before(self, next_version: Version) -> list[str]:
        """Ids of the samples that have to be consumed before `next_version` is captured (policy `wait`)."""
        if self._bound is None or self._policy != "wait":
            return []
        limit = staleness.needed_before(next_version, self._bound)
        consumed, self._consumed = self._consumed, []
        return await self._source.outstanding_before(limit.packed, consumed)

    def refuses(self, sample: Sample, captured: Version) -> bool:
        """Whether this sample is beyond the bound and dropped for it (policy `drop`)."""
        if self._bound is None or self._policy != "drop":
            return False
        return staleness.is_over(sample, captured, self._lineage, self._bound)

    async def refused(self, samples: Sequence[Sample]) -> None:
        """Tell the rollouter that these were dropped, so that others are made."""
        await self._source.samples_dropped([sample.sample_id for sample in samples])

    def consumed(self, samples: Sequence[Sample]) -> None:
        """These samples are in a batch."""
        if self._bound is not None and self._policy == "wait":
            self._consumed.extend(sample.sample_id for sample in samples)

    def loss_mask(self, response: Response, captured: Version) -> list[int]:
        """1 per token that may enter the loss, 0 beyond the bound.

        With the policy `wait` none is beyond it, unless a sync was aborted and its weights were captured again under
        the next number.
        """
        return staleness.loss_mask(response, captured, self._lineage, self._bound)
