"""Log-probs and entropies of a linear layer's distribution over a large vocabulary, without its logits in memory.

Law: the logits exist one block of tokens times vocabulary at a time; the backward pass computes them again. Values and
gradients are those of `log_softmax` over the whole, up to the rounding of sums in another order. Memory beyond the
arguments and their gradients is a few blocks, whatever the number of tokens and the size of the vocabulary.

Method: the softmax's normaliser is gathered online over blocks (arXiv 1805.02867), as in Cut Your Losses,
arXiv 2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

TOKENS_AT_ONCE: Final = 1024
VOCABULARY_AT_ONCE: Final = 4096  # 16 MiB of logits: larger blocks cost the allocator a new mapping each
# Logits of -infinity count as this far below the highest one: their probability is 0, and 0 times it is 0.
LOWEST: Final = -1e30


@dataclass(frozen=True, slots=True)
class LogitForm:
    """How the numbers of the linear layer become logits: `scale` times them, then c tanh(x / c) with c = `softcap`,
    then divided by `temperature`.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def logits(self, numbers: Tensor) -> Tensor:
        """The logits, in float32 at least."""
        scaled = numbers.to(_working_type(numbers))
        if self.scale != 1.0:
            scaled = scaled * self.scale
        if self.softcap is not None:
            scaled = self.softcap * torch.tanh(scaled / self.softcap)
        return scaled if self.temperature == 1.0 else scaled / self.temperature

    def pull_back(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Gradient with respect to the layer's numbers, given that of their logits."""
        gradient = gradient * (self.scale / self.temperature)
        if self.softcap is None:
            return gradient
        return gradient * (1.0 - (logits * self.temperature / self.softcap).square())


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens and vocabulary entries of one block of logits."""

    tokens: int = TOKENS_AT_ONCE
    vocabulary: int = VOCABULARY_AT_ONCE


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: LogitForm,
    blocks: BlockSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax of `form`'s logits of hidden @ weight.T + bias, and the entropy.

    Args:
        hidden: [N, H], of any floating type.
        weight: [V, H], of the same type.
        bias: [V] or None.
        targets: [N], int64.

    Returns:
        Two tensors [N], float32 (float64 for float64), in nats; both carry gradients to `hidden`, `weight` and `bias`.
    """
    result: tuple[Tensor, Tensor] = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, form, blocks or BlockSizes()
    )
    return result


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: LogitForm,
        blocks: BlockSizes,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _forward_block(hidden[tokens], weight, bias, targets[tokens], form, blocks)
            for tokens in _slices(hidden.shape[0], blocks.tokens)
        ]
        empty = hidden.new_zeros(0, dtype=_working_type(hidden))
        logprobs, entropies, normalisers = (
            torch.cat([part[i] for part in parts]) if parts else empty for i in range(3)
        )
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.form, ctx.blocks = form, blocks
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalisers)
        wanted = ctx.needs_input_grad
        into_hidden = torch.zeros_like(hidden) if wanted[0] else None
        into_weight = torch.zeros_like(weight) if wanted[1] else None
        into_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        for tokens in _slices(hidden.shape[0], ctx.blocks.tokens):
            rows, columns = torch.arange(tokens.stop - tokens.start, device=hidden.device), targets[tokens]
            for entries in _slices(weight.shape[0], ctx.blocks.vocabulary):
                logits = ctx.form.logits(_numbers(hidden[tokens], weight, bias, entries))
                log_p = (logits - normalisers[tokens, None]).clamp_min_(LOWEST)
                p = log_p.exp()
                gradient = p * -of_logprobs[tokens, None]
                inside = (columns >= entries.start) & (columns < entries.stop)
                gradient[rows[inside], columns[inside] - entries.start] += of_logprobs[tokens][inside]
                if of_entropies is not None:
                    # d entropy / d logit = -p (log p + entropy)
                    gradient -= p.mul_(log_p.add_(entropies[tokens, None])).mul_(of_entropies[tokens, None])
                back = ctx.form.pull_back(gradient, logits).to(hidden.dtype)
                if into_hidden is not None:
                    into_hidden[tokens].addmm_(back, weight[entries])
                if into_weight is not None:
                    into_weight[entries].addmm_(back.T, hidden[tokens])
                if into_bias is not None:
                    into_bias[entries] += back.sum(0)
        return into_hidden, into_weight, into_bias, None, None, None


def _forward_block(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm, blocks: BlockSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log normalisers of one block of tokens, gathered over blocks of the vocabulary."""
    count, kind = hidden.shape[0], _working_type(hidden)
    highest = hidden.new_full((count,), torch.finfo(kind).min, dtype=kind)
    total, moment, chosen = (hidden.new_zeros(count, dtype=kind) for _ in range(3))
    rows = torch.arange(count, device=hidden.device)
    for entries in _slices(weight.shape[0], blocks.vocabulary):
        logits = form.logits(_numbers(hidden, weight, bias, entries))
        inside = (targets >= entries.start) & (targets < entries.stop)
        chosen[inside] = logits[rows[inside], targets[inside] - entries.start]
        higher = torch.maximum(highest, logits.amax(1))
        shrink = (highest - higher).clamp_min(LOWEST)
        distance = logits.sub_(higher[:, None]).clamp_min_(LOWEST)
        weights = distance.exp()
        # The sum of weight times distance, with distances measured from the new maximum.
        moment = shrink.exp() * (moment + shrink * total) + distance.mul_(weights).sum(1)
        total = shrink.exp() * total + weights.sum(1)
        highest = higher
    log_total = total.log()
    normaliser = highest + log_total
    return chosen - normaliser, log_total - moment / total, normaliser


def _working_type(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _numbers(hidden: Tensor, weight: Tensor, bias: Tensor | None, entries: slice) -> Tensor:
    return torch.nn.functional.linear(hidden, weight[entries], None if bias is None else bias[entries])


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
