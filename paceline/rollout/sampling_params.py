"""How tokens of training rollouts and of validations are drawn."""

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


def validation_params(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """As `rollout.val_kwargs` says: greedy unless it draws."""
    chosen = config.rollout.val_kwargs
    return SamplingParams(
        temperature=chosen.temperature if chosen.do_sample else 0.0,
        top_p=chosen.top_p if chosen.do_sample else 1.0,
        top_k=chosen.top_k if chosen.do_sample else -1,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stop_token_ids,
    )
