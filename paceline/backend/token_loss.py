"""The loss of a micro-batch, put together from its parts, and what is measured of it.

    loss = sum over tokens of token weight * (importance weight * policy loss - entropy bonus + KL to the reference)

Law: the parts are constants or functions of one forward pass; which of them are there is decided by the configuration
alone, so every update of a run has the same metrics (but for those per version lag).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from paceline.algo.aggregation import aggregate
from paceline.algo.kl_penalty import KlEstimator, kl_penalty
from paceline.algo.policy_loss import TokenLoss, cispo_loss, gspo_loss, ppo_loss
from paceline.algo.rollout_correction import importance_weights
from paceline.algo.token_statistics import RATIO_MEANS, TokenSums, token_sums
from paceline.backend.causal_policy import CausalPolicy, TokenDistributions
from paceline.backend.packing import MicroBatch
from paceline.core.sections.actor import ActorConfig
from paceline.core.sections.algorithm import RolloutCorrectionConfig

MEANS: Final = (
    *RATIO_MEANS,
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/ratio_mean",
)
ESTIMATORS: Final[Mapping[str, KlEstimator]] = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
}


class BatchLoss:
    """`reference` is the frozen policy of the KL term, None without it."""

    def __init__(self, actor: ActorConfig, correction: RolloutCorrectionConfig, reference: CausalPolicy | None) -> None:
        self._actor = actor
        self._correction = correction
        self._reference = reference

    def of(
        self,
        micro: MicroBatch,
        distributions: TokenDistributions,
        proximal: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, Mapping[str, float], TokenSums]:
        """This micro-batch's share of the batch's loss, a scalar that carries the gradient; named shares of it; sums.

        `proximal` [N] has the log-probs of the proximal policy, None where that is the trained policy as it is now.
        """
        actor = self._actor
        logprobs = distributions.logprobs
        old = micro.rollout_logprobs
        if not self._correction.bypass_mode:
            old = logprobs.detach() if proximal is None else proximal
        policy = self._policy_loss(micro, logprobs, old)
        means = {
            "actor/entropy": distributions.entropies,
            "actor/pg_clipfrac": policy.clipped,
            "actor/pg_clipfrac_lower": policy.clipped_lower,
            "actor/ppo_kl": old - logprobs.detach(),
            "actor/ratio_mean": policy.ratio,
        }
        maxima = {"actor/ratio_max": policy.ratio}
        per_token = policy.loss
        if self._correction.rollout_is is not None:
            weights = importance_weights(
                old,
                micro.rollout_logprobs,
                micro.loss_mask,
                micro.sequences,
                level=self._correction.rollout_is,
                threshold=self._correction.rollout_is_threshold,
            )
            per_token = per_token * weights
            means["rollout_corr/rollout_is_mean"] = weights
            maxima["rollout_corr/rollout_is_max"] = weights
        loss = aggregate(per_token, micro.token_weights)
        shares = {"actor/pg_loss": loss.item()}
        if actor.entropy_coeff > 0:
            loss = loss - actor.entropy_coeff * aggregate(distributions.entropies, micro.token_weights)
        if self._reference is not None:
            kl_loss = aggregate(self._kl(micro, logprobs, temperature), micro.token_weights)
            shares["actor/kl_loss"] = kl_loss.item()
            loss = loss + actor.kl_loss_coef * kl_loss
        sums = token_sums(logprobs, micro.rollout_logprobs, micro.loss_mask, micro.lags, means=means, maxima=maxima)
        return loss, shares, sums

    def nothing(self) -> tuple[Mapping[str, float], TokenSums]:
        """The shares and sums of no token, under all their names."""
        means = dict.fromkeys(MEANS, 0.0)
        maxima = {"actor/ratio_max": 0.0}
        shares = {"actor/pg_loss": 0.0}
        if self._correction.rollout_is is not None:
            means["rollout_corr/rollout_is_mean"] = maxima["rollout_corr/rollout_is_max"] = 0.0
        if self._reference is not None:
            shares["actor/kl_loss"] = 0.0
        return shares, TokenSums(means=means, maxima=maxima)

    def _policy_loss(self, micro: MicroBatch, logprobs: Tensor, old: Tensor) -> TokenLoss:
        actor = self._actor
        tokens = (logprobs, old, micro.advantages, micro.loss_mask)
        if actor.policy_loss.loss_mode == "gspo":
            return gspo_loss(*tokens, micro.sequences, clip_low=actor.clip_ratio_low, clip_high=actor.clip_ratio_high)
        if actor.policy_loss.loss_mode == "cispo":
            return cispo_loss(*tokens, clip_low=actor.clip_ratio_low, clip_high=actor.clip_ratio_high)
        return ppo_loss(
            *tokens, clip_low=actor.clip_ratio_low, clip_high=actor.clip_ratio_high, clip_c=actor.clip_ratio_c
        )

    def _kl(self, micro: MicroBatch, logprobs: Tensor, temperature: float) -> Tensor:
        assert self._reference is not None
        with torch.no_grad():
            reference = self._reference.distributions(micro, temperature).logprobs
        return kl_penalty(logprobs, reference, micro.loss_mask, ESTIMATORS[self._actor.kl_loss_type])
