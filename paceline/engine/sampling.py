"""How next tokens are drawn: temperature, top-k, top-p, per row and mixed in one batch.

Law (V8): the log-prob that is reported is that of the distribution the token was drawn from, after temperature, top-k
and top-p, renormalised. A greedy row (temperature 0) has no such distribution: it reports the log-prob under
temperature 1 without filters. Filters follow the usual order: temperature, then top-k, then top-p on what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What the rows of a batch ask for; valid until a row changes. None: no row asks for it.

    Attributes:
        inverse_temperature: [rows, 1] float32, 1 for greedy rows.
        greedy: [rows] bool.
        filtered: indices of rows with top-k or top-p, [f] int64, with their `top_k` and `top_p`, [f, 1].
    """

    all_greedy: bool
    inverse_temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    filtered: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor


def plan_sampling(
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    device: torch.device,
) -> SamplingPlan:
    """Sort the rows' parameters, each [rows], into what has to be computed for them."""
    greedy = temperature == 0
    safe = np.where(greedy, np.float32(1), temperature)
    filtered = np.flatnonzero(((top_p < 1) | (top_k > 0)) & ~greedy)
    return SamplingPlan(
        all_greedy=bool(greedy.all()),
        inverse_temperature=torch.from_numpy(1 / safe[:, None]).to(device) if (safe != 1).any() else None,
        greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
        filtered=torch.from_numpy(filtered).to(device) if filtered.size else None,
        top_k=torch.from_numpy(top_k[filtered][:, None]).to(device),
        top_p=torch.from_numpy(top_p[filtered][:, None]).to(device),
    )


def sample(logits: torch.Tensor, plan: SamplingPlan, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, by inversion of the cumulative distribution: one random number per row and no sort.

    Args:
        logits: [rows, vocabulary], any float dtype.

    Returns:
        Tokens [rows] int64 and their natural-log probabilities [rows] float32.
    """
    scores = logits.float()
    if plan.inverse_temperature is not None:
        scores = scores * plan.inverse_temperature
    if plan.filtered is not None:
        kept = keep_likeliest(scores[plan.filtered], plan.top_k, plan.top_p)
        scores = scores.index_copy(0, plan.filtered, kept)
    probabilities = scores.softmax(dim=-1)
    if plan.all_greedy:
        tokens = scores.argmax(dim=-1, keepdim=True)
    else:
        # Sums in float64: in float32 the tail of a large vocabulary would be lost in rounding.
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        drawn = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=logits.device) * total
        # right=True: a token of probability 0 ends where the one before it ends, so it is never the first beyond.
        tokens = torch.searchsorted(cumulative, drawn, right=True).clamp_max_(logits.shape[-1] - 1)
        if plan.greedy is not None:
            tokens = torch.where(plan.greedy[:, None], scores.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


def keep_likeliest(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, then top-p of the rest leave out; the likeliest token always stays.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches p (nucleus sampling, Holtzman et al.
    2020).

    Args:
        scores: [rows, vocabulary] float32.
        top_k: [rows, 1] int64, values below 1 are off.
        top_p: [rows, 1] float32, 1 is off.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)
