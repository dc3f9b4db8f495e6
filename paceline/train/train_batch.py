"""From samples to the batch of one update: shaped rewards, advantages within each group, masks and lags per token."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.algo.advantage import group_advantages
from paceline.algo.overlong import overlong_penalty
from paceline.core.config import Config
from paceline.core.sample import Response, Sample, TrainBatch, TrainSequence
from paceline.core.version import Lineage, Version
from paceline.train.lag_gate import LagGate


def make_train_batch(
    samples: Sequence[Sample], captured: Version, *, config: Config, lineage: Lineage, gate: LagGate
) -> TrainBatch:
    """The batch of these samples, consumed while `captured` is the last captured version (V7).

    A response whose reward is not finite is left out. All updates under one captured version are one window.

    Raises:
        VersionError: a token is newer than the captured version or its lineage is lost.
    """
    sequences: list[TrainSequence] = []
    versions = {version for sample in samples for response in sample.responses for version in response.versions}
    lags = {version: lineage.lag(captured, Version.unpack(version)) for version in versions}
    for sample in samples:
        rewards = [response.reward + _length_penalty(response, config) for response in sample.responses]
        advantages = group_advantages(rewards, config.algorithm.adv_estimator)
        sequences.extend(
            TrainSequence(
                prompt_ids=sample.prompt.token_ids,
                response_ids=response.token_ids,
                rollout_logprobs=response.logprobs,
                loss_mask=gate.loss_mask(response, captured),
                advantage=advantage,
                lags=[lags[version] for version in response.versions],
            )
            for response, advantage in zip(sample.responses, advantages, strict=True)
            if advantage is not None
        )
    return TrainBatch(sequences=sequences, temperature=config.rollout.temperature, window=captured.packed)


def _length_penalty(response: Response, config: Config) -> float:
    overlong = config.reward.overlong_buffer
    if not overlong.enable:
        return 0.0
    return overlong_penalty(
        len(response.token_ids),
        max_response_length=config.data.max_response_length,
        buffer_length=overlong.len,
        penalty_factor=overlong.penalty_factor,
    )
