"""How tokens of training rollouts are drawn."""

from __future__ import annotations

from paceline.core.config import Config
from paceline.core.sample import SamplingParams


def training_params(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """As configured."""
    return SamplingParams(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stop_token_ids,
    )
