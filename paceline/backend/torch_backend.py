"""Train backend on plain PyTorch, in one process: float32 master weights, AdamW, clipped policy gradient.

Law: one `update` is at most one optimiser step. Normalisation is over the whole batch, so micro-batches change
nothing but memory. A step whose gradient norm is not finite, or a batch without a token in the loss, leaves weights
and optimiser as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.algo.aggregation import sequence_weights
from paceline.algo.token_statistics import TokenSums
from paceline.backend.causal_lm import load_causal_lm, save_causal_lm
from paceline.backend.causal_policy import CausalPolicy
from paceline.backend.correction_pass import CorrectionPass
from paceline.backend.packing import MicroBatch, collate, plan_micro_batches, plan_rows
from paceline.backend.token_loss import BatchLoss
from paceline.backend.training_state import load_training_state, save_training_state
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from paceline.core.sections.algorithm import RolloutCorrectionConfig
from paceline.weights.named_tensors import collect

BYPASS: Final = RolloutCorrectionConfig()
DTYPES: Final[Mapping[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchBackend:
    """Implements `core.ports.TrainBackend`. The thread count of the process is its owner's affair."""

    def __init__(
        self, *, model_path: str, actor: ActorConfig, seed: int, correction: RolloutCorrectionConfig = BYPASS
    ) -> None:
        torch.manual_seed(seed)
        self._actor = actor
        self._model_path = model_path
        self._model = load_causal_lm(model_path)
        self._policy = CausalPolicy.of(self._model)
        frozen_type = DTYPES[actor.reference_dtype]
        self._loss = BatchLoss(actor, correction, self._policy.frozen(frozen_type) if actor.use_kl_loss else None)
        self._correction = CorrectionPass(self._policy, correction, frozen_type)
        self._longest_shared_row = self._policy.longest_shared_row()
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            # Zero and not None: a batch whose advantages are all 0 is a step like any other, with its momentum.
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=actor.optim.lr,
            betas=actor.optim.betas,
            weight_decay=actor.optim.weight_decay,
            fused=True,
        )
        self._steps = 0

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimiser step over the batch. Metrics are token means over the tokens in the loss.

        `actor/skipped_nonfinite` and `actor/skipped_empty` are 1.0 when no step was made for that reason.

        Raises:
            ValueError: lists of a sequence differ in length, or its prompt is empty.
        """
        for index, sequence in enumerate(batch.sequences):
            _check(index, sequence)
        corrected = self._correction.run(batch, self._micro_batches)
        sequences, proximal = corrected.sequences, corrected.proximal
        totals = _Totals(self._loss, corrected.rejected)
        loss_tokens = [sum(sequence.loss_mask) for sequence in sequences]
        if not any(loss_tokens):
            return totals.metrics() | self._no_step()
        weights = sequence_weights(loss_tokens, self._actor.loss_agg_mode, self._actor.loss_scale_factor)
        learning, watched = self._divide(sequences, loss_tokens)
        self._optimizer.zero_grad(set_to_none=False)
        for micro in self._micro_batches(sequences, learning, weights):
            self._forward(micro, proximal, batch.temperature, totals).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for micro in self._micro_batches(sequences, watched, weights):
                self._forward(micro, proximal, batch.temperature, totals)
        return totals.metrics() | self._step()

    def named_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """All parameters and persistent buffers, every name of tied weights included, in a stable order."""
        return collect(self._model)

    def save_pretrained(self, directory: str) -> None:
        """Write the model, its configuration and the tokenizer files as a Hugging Face directory."""
        save_causal_lm(self._model, self._model_path, directory)

    def save_state(self, directory: str) -> bool:
        """Write weights, AdamW's state and torch's random state; returns whether all numbers are finite."""
        return save_training_state(self._model, self._optimizer, self._steps, Path(directory))

    def load_state(self, directory: str) -> None:
        """Go on, bit for bit, from what `save_state` wrote; a proximal policy begins anew with the next window.

        Raises:
            CheckpointError: it is of another model; nothing has changed.
        """
        self._steps = load_training_state(self._model, self._optimizer, Path(directory))
        self._correction.forget()

    def _divide(self, sequences: Sequence[TrainSequence], loss_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Indices of the sequences that have a gradient, and of those that are computed for the metrics alone.

        A group with equal rewards has advantage 0 throughout: without an entropy bonus and a KL term its gradient is
        exactly 0, and the backward pass, two thirds of the cost, is saved.
        """
        counted = [index for index, tokens in enumerate(loss_tokens) if tokens]
        if self._actor.entropy_coeff > 0 or self._actor.use_kl_loss:
            return counted, []
        return (
            [index for index in counted if sequences[index].advantage != 0.0],
            [index for index in counted if sequences[index].advantage == 0.0],
        )

    def _micro_batches(
        self, sequences: Sequence[TrainSequence], chosen: Sequence[int], weights: Sequence[float]
    ) -> Iterable[MicroBatch]:
        rows = plan_rows(sequences, chosen, self._longest_shared_row)
        for micro in plan_micro_batches(rows, self._actor.ppo_micro_batch_tokens):
            yield collate(micro, sequences, weights)

    def _forward(
        self, micro: MicroBatch, proximal: Sequence[Tensor] | None, temperature: float, totals: _Totals
    ) -> Tensor:
        """This micro-batch's share of the loss, a scalar; adds its share of the metrics to `totals`."""
        old = None if proximal is None else torch.cat([proximal[index] for index in micro.members])
        loss, shares, sums = self._loss.of(micro, self._policy.distributions(micro, temperature), old, temperature)
        totals.add(shares, sums)
        return loss

    def _step(self) -> dict[str, float]:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._actor.grad_clip).item()
        rate = self._next_rate()
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._steps += 1
        return {
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_nonfinite": float(not finite),
            "actor/skipped_empty": 0.0,
        }

    def _no_step(self) -> dict[str, float]:
        return {
            "actor/grad_norm": 0.0,
            "actor/lr": self._next_rate(),
            "actor/skipped_nonfinite": 0.0,
            "actor/skipped_empty": 1.0,
        }

    def _next_rate(self) -> float:
        """Learning rate of the next step: the n-th of a warm-up of w steps has n / w of the full rate."""
        optim = self._actor.optim
        return optim.lr * min(1.0, (self._steps + 1) / max(optim.lr_warmup_steps, 1))


class _Totals:
    """Sums over the micro-batches of one update."""

    def __init__(self, loss: BatchLoss, rejected: float) -> None:
        self._shares, self._sums = loss.nothing()
        self._rejected = rejected

    def add(self, shares: Mapping[str, float], sums: TokenSums) -> None:
        """`shares` are the micro-batch's parts of figures of the whole batch."""
        self._shares = {name: self._shares[name] + share for name, share in shares.items()}
        self._sums = self._sums.plus(sums)

    def metrics(self) -> dict[str, float]:
        return {
            **self._shares,
            "actor/loss_tokens": self._sums.tokens,
            "rollout_corr/rollout_rs_masked_fraction": self._rejected,
            **self._sums.metrics(),
        }


def _check(index: int, sequence: TrainSequence) -> None:
    lengths = {len(sequence.response_ids), len(sequence.rollout_logprobs), len(sequence.loss_mask)}
    if len(lengths) != 1:
        raise ValueError(f"sequence {index}: response_ids, rollout_logprobs and loss_mask differ in length")
    if not sequence.prompt_ids:
        raise ValueError(f"sequence {index}: the prompt is empty, nothing predicts the first response token")
