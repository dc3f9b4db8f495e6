"""`actor.*`: the update of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class OptimConfig(Section):
    """`actor.optim.*`: AdamW on fp32 master weights."""

    lr: float = Field(3e-5, ge=0, description="Learning rate after the warm-up.")
    lr_warmup_steps: int = Field(5, ge=0, description="Updates over which the learning rate rises linearly from 0.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decay rates.")


class PolicyLossConfig(Section):
    """`actor.policy_loss.*`"""

    loss_mode: Literal["vanilla", "gspo", "cispo"] = Field(
        "vanilla",
        description="vanilla: PPO's clip per token; gspo: one clipped ratio per sequence; cispo: the clipped ratio is "
        "a weight, and every token keeps its gradient.",
    )


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
    clip_ratio_c: float | None = Field(
        3.0,
        gt=1,
        description="Dual clip of loss_mode=vanilla: where the advantage is negative the ratio counts as at most this; "
        "none: no such bound.",
    )
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        Field("token-mean", description="How per-token losses become one number.")
    )
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        description="What loss_agg_mode=seq-mean-token-sum-norm divides by, the same for every sequence, as a rule "
        "data.max_response_length.",
    )
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(
        False, description="Add the KL divergence from the initial weights, kept as a frozen copy, to the loss."
    )
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of that divergence.")
    kl_loss_type: Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl"] = Field(
        "low_var_kl", description="Its estimator per token: k1 (also kl), k2 (also mse), k3 (also low_var_kl)."
    )
    reference_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type in which frozen copies of the weights (reference, proximal policy) are kept."
    )
    optim: OptimConfig = Field(default_factory=OptimConfig)

    @model_validator(mode="after")
    def _possible(self) -> ActorConfig:
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            raise ValueError(
                "loss_agg_mode=seq-mean-token-sum-norm needs actor.loss_scale_factor, "
                "as a rule data.max_response_length"
            )
        if self.policy_loss.loss_mode == "gspo" and self.loss_agg_mode != "seq-mean-token-mean":
            raise ValueError(
                "policy_loss.loss_mode=gspo is a mean over sequences: set actor.loss_agg_mode=seq-mean-token-mean"
            )
        return self
