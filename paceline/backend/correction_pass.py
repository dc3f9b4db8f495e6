"""What has to be known of a whole batch before the first pass with a gradient: log-probs of the proximal policy, and
which tokens the bounds on the ratio leave in the loss.

Law: normalisation is over the tokens that are left, so the bounds are applied before weights are fixed. A forward pass
is made only where it is needed: not in bypass mode without bounds, nor while the proximal policy is the trained one.

    window of updates   v      v      v+1    v+1           (one captured version each)
    proximal policy     now    as v   now    as v+1        (now: the trained policy as the update finds it)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from paceline.algo.rollout_correction import accepted
from paceline.backend.causal_policy import CausalPolicy
from paceline.backend.packing import MicroBatch
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.algorithm import RolloutCorrectionConfig

MicroBatches = Callable[[Sequence[TrainSequence], Sequence[int], Sequence[float]], Iterable[MicroBatch]]


@dataclass(frozen=True, slots=True)
class Corrected:
    """`sequences` with the tokens that are left; `proximal` log-probs per sequence, None: those of the trained policy
    as it is now; `rejected`, the share of tokens that the bounds took out.
    """

    sequences: Sequence[TrainSequence]
    proximal: Sequence[Tensor] | None
    rejected: float


class CorrectionPass:
    """Keeps the proximal policy of the window (decoupled PPO, arXiv 2110.00641; for stale samples arXiv 2505.24298)."""

    def __init__(self, policy: CausalPolicy, correction: RolloutCorrectionConfig, dtype: torch.dtype) -> None:
        self._policy = policy
        self._correction = correction
        self._frozen = None if correction.bypass_mode else policy.frozen(dtype)
        self._window: int | None = None

    def run(self, batch: TrainBatch, micro_batches: MicroBatches) -> Corrected:
        """Before the optimiser touches the weights; `micro_batches` lays out sequences of the batch."""
        policy = self._proximal(batch.window)
        if policy is self._policy and self._correction.rollout_rs is None:
            return Corrected(batch.sequences, None, 0.0)
        sequences = batch.sequences
        logprobs = [torch.zeros(len(sequence.response_ids)) for sequence in sequences]
        masks = [torch.tensor(sequence.loss_mask) for sequence in sequences]
        counted = [index for index, sequence in enumerate(sequences) if any(sequence.loss_mask)]
        for micro in micro_batches(sequences, counted, [0.0] * len(sequences)):
            with torch.no_grad():
                found = policy.distributions(micro, batch.temperature).logprobs
            kept = self._accepted(micro, found)
            sizes = [len(sequences[index].response_ids) for index in micro.members]
            parts = zip(micro.members, torch.split(found, sizes), torch.split(kept, sizes), strict=True)
            for index, part, mask in parts:
                logprobs[index], masks[index] = part, mask
        return Corrected(
            sequences=[
                msgspec.structs.replace(sequence, loss_mask=mask.int().tolist())
                for sequence, mask in zip(sequences, masks, strict=True)
            ],
            proximal=None if policy is self._policy else logprobs,
            rejected=_rejected(sequences, masks),
        )

    def forget(self) -> None:
        """The weights were changed from outside: the next update begins a window."""
        self._window = None

    def _proximal(self, window: int | None) -> CausalPolicy:
        if self._frozen is None:
            return self._policy
        if window is None or window != self._window:
            self._frozen.copy_from(self._policy)
            self._window = window
            return self._policy
        return self._frozen

    def _accepted(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        level = self._correction.rollout_rs
        if level is None:
            return micro.loss_mask
        lower, upper = self._correction.bounds
        return accepted(
            logprobs, micro.rollout_logprobs, micro.loss_mask, micro.sequences, level=level, lower=lower, upper=upper
        )


def _rejected(sequences: Sequence[TrainSequence], masks: Sequence[Tensor]) -> float:
    before = sum(sum(sequence.loss_mask) for sequence in sequences)
    left = sum(int(mask.sum()) for mask in masks)
    return 1.0 - left / before if before else 0.0
