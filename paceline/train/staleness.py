"""The bound on version lag, `async_training.max_version_lag`, per token and taken when a sample is consumed (V7).

    wait   the last update before a sync takes every sample that the sync would carry over the bound; the sync waits
    mask   tokens beyond the bound leave the loss
    drop   samples with a token beyond the bound are dropped, counted by response length, and made again

A token's lag is the captured version minus its own, along the lineage of this life. `None` is no bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.core.errors import VersionError
from paceline.core.sample import Response, Sample
from paceline.core.version import Lineage, Version


def token_lags(samples: Iterable[Sample], captured: Version, lineage: Lineage) -> dict[int, int]:
    """Lag -> number of response tokens with that lag.

    Raises:
        VersionError: a token is newer than the captured version or its lineage is lost.
    """
    versions = Counter(v for sample in samples for response in sample.responses for v in response.versions)
    lags: Counter[int] = Counter()
    for packed, count in versions.items():
        lags[lineage.lag(captured, Version.unpack(packed))] += count
    return dict(lags)


def oldest_version(sample: Sample) -> Version | None:
    """Version of the oldest token, None for a sample without tokens."""
    versions = [v for response in sample.responses for v in response.versions]
    return Version.unpack(min(versions)) if versions else None


def is_over(sample: Sample, captured: Version, lineage: Lineage, bound: int) -> bool:
    """Whether a token of this sample lies beyond the bound."""
    oldest = oldest_version(sample)
    return oldest is not None and lineage.lag(captured, oldest) > bound


def loss_mask(response: Response, captured: Version, lineage: Lineage, bound: int | None) -> list[int]:
    """1 for each token of the response that may enter the loss, 0 beyond the bound; as long as the response."""
    if bound is None:
        return [1] * len(response.token_ids)
    return [1 if lineage.lag(captured, Version.unpack(v)) <= bound else 0 for v in response.versions]


def needed_before(next_version: Version, bound: int) -> Version:
    """The oldest version that may still be unconsumed when `next_version` is captured.

    Raises:
        VersionError: the bound is negative.
    """
    if bound < 0:
        raise VersionError(f"max_version_lag {bound} is negative")
    return Version(next_version.life, max(0, next_version.n - bound))
