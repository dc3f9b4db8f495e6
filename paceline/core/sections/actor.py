"""`actor.*`: the update of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.sections.section import Section


class OptimConfig(Section):
    """`actor.optim.*`: AdamW on fp32 master weights."""

    lr: float = Field(3e-5, ge=0, description="Learning rate after the warm-up.")
    lr_warmup_steps: int = Field(5, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decay rates.")


class ActorConfig(Section):
    """`actor.*`"""

    ppo_mini_batch_size: int = Field(
        64, ge=1, description="Samples (prompts with their responses) per optimiser update."
    )
    ppo_micro_batch_tokens: int = Field(
        16384, ge=16, description="Most tokens (padding included) of one forward and backward pass."
    )
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="The probability ratio is clipped below 1 minus this.")
    clip_ratio_high: float = Field(0.28, gt=0, description="The probability ratio is clipped above 1 plus this.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        "token-mean", description="How per-token losses become one number."
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    optim: OptimConfig = Field(default_factory=OptimConfig)
