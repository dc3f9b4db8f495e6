"""Train backend on plain PyTorch, in one process: float32 master weights, AdamW, clipped policy gradient.

Law: one `update` is at most one optimiser step. Normalisation is over the whole batch, so micro-batches change
nothing but memory. A step whose gradient norm is not finite, or a batch without a token in the loss, leaves weights
and optimiser as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.algo.aggregation import aggregate, sequence_weights
from paceline.algo.policy_loss import NO_TOKENS, PolicyStatistics, policy_loss
from paceline.backend.causal_lm import (
    load_causal_lm,
    log_distributions,
    longest_shared_row,
    save_causal_lm,
    token_entropies,
    token_logprobs,
)
from paceline.backend.packing import MicroBatch, Row, collate, plan_micro_batches, plan_rows
from paceline.backend.training_state import load_training_state, save_training_state
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
from paceline.weights.named_tensors import collect


class TorchBackend:
    """Implements `core.ports.TrainBackend`. The thread count of the process is its owner's affair."""

    def __init__(self, *, model_path: str, actor: ActorConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self._actor = actor
        self._model_path = model_path
        self._model = load_causal_lm(model_path)
        self._longest_shared_row = longest_shared_row(self._model)
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
        sequences = batch.sequences
        for index, sequence in enumerate(sequences):
            _check(index, sequence)
        loss_tokens = [sum(sequence.loss_mask) for sequence in sequences]
        totals = _Totals()
        if not any(loss_tokens):
            return totals.metrics() | self._no_step()
        weights = sequence_weights(loss_tokens, self._actor.loss_agg_mode)
        learning, watched = self._divide(sequences, loss_tokens)
        self._optimizer.zero_grad(set_to_none=False)
        for rows in self._plan(sequences, learning):
            self._forward(collate(rows, sequences, weights), batch.temperature, totals).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for rows in self._plan(sequences, watched):
                self._forward(collate(rows, sequences, weights), batch.temperature, totals)
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
        """Go on, bit for bit, from what `save_state` wrote.

        Raises:
            CheckpointError: it is of another model; nothing has changed.
        """
        self._steps = load_training_state(self._model, self._optimizer, Path(directory))

    def _divide(self, sequences: Sequence[TrainSequence], loss_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Indices of the sequences that have a gradient, and of those that are computed for the metrics alone.

        A group with equal rewards has advantage 0 throughout: without an entropy bonus its gradient is exactly 0, and
        the backward pass, two thirds of the cost, is saved.
        """
        counted = [index for index, tokens in enumerate(loss_tokens) if tokens]
        if self._actor.entropy_coeff > 0:
            return counted, []
        return (
            [index for index in counted if sequences[index].advantage != 0.0],
            [index for index in counted if sequences[index].advantage == 0.0],
        )

    def _plan(self, sequences: Sequence[TrainSequence], chosen: Sequence[int]) -> list[list[Row]]:
        rows = plan_rows(sequences, chosen, self._longest_shared_row)
        return plan_micro_batches(rows, self._actor.ppo_micro_batch_tokens)

    def _forward(self, micro: MicroBatch, temperature: float, totals: _Totals) -> Tensor:
        """This micro-batch's share of the loss, a scalar; adds its share of the metrics to `totals`."""
        actor = self._actor
        log_distribution, which = log_distributions(self._model, micro, temperature)
        per_token, statistics = policy_loss(
            token_logprobs(log_distribution, which, micro.targets),
            micro.rollout_logprobs,
            micro.advantages,
            micro.loss_mask,
            clip_low=actor.clip_ratio_low,
            clip_high=actor.clip_ratio_high,
        )
        loss = aggregate(per_token, micro.token_weights)
        pg_loss = loss.item()
        if actor.entropy_coeff > 0:
            entropies = token_entropies(log_distribution, which)
            loss = loss - actor.entropy_coeff * aggregate(entropies, micro.token_weights)
        else:
            entropies = token_entropies(log_distribution.detach(), which)
        totals.add(statistics, pg_loss, float(entropies.detach()[micro.loss_mask].sum()))
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

    def __init__(self) -> None:
        self._statistics = NO_TOKENS
        self._pg_loss = 0.0
        self._entropy = 0.0

    def add(self, statistics: PolicyStatistics, pg_loss: float, entropy: float) -> None:
        """`pg_loss` is the micro-batch's share of the batch's loss, `entropy` a sum over its tokens in the loss."""
        self._statistics = self._statistics.plus(statistics)
        self._pg_loss += pg_loss
        self._entropy += entropy

    def metrics(self) -> dict[str, float]:
        tokens = self._statistics.tokens
        return {
            "actor/pg_loss": self._pg_loss,
            "actor/entropy": self._entropy / max(tokens, 1.0),
            "actor/loss_tokens": tokens,
            **self._statistics.metrics(),
        }


def _check(index: int, sequence: TrainSequence) -> None:
    lengths = {len(sequence.response_ids), len(sequence.rollout_logprobs), len(sequence.loss_mask)}
    if len(lengths) != 1:
        raise ValueError(f"sequence {index}: response_ids, rollout_logprobs and loss_mask differ in length")
    if not sequence.prompt_ids:
        raise ValueError(f"sequence {index}: the prompt is empty, nothing predicts the first response token")
