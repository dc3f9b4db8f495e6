"""Weights before and after an update, for `paceline bench codec`: synthetic, and the shipped model's."""

from __future__ import annotations

from importlib.resources import files

import torch

TENSORS = 16
WARM_STEPS = 4
_BETAS = (0.9, 0.999)
_SHIPPED_WARM_STEPS = 32


def synthetic_trace(elements: int, learning_rate: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """bf16 weights before and after one step of Adam on float32 masters, after `WARM_STEPS` such steps.

    Weights are N(0, 0.02), gradients are independent and Gaussian: `TENSORS` tensors of `elements / TENSORS`.
    """
    draw = torch.Generator().manual_seed(0)
    base: dict[str, torch.Tensor] = {}
    target: dict[str, torch.Tensor] = {}
    for index in range(TENSORS):
        weights = torch.randn(elements // TENSORS, generator=draw) * 0.02
        mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(1, WARM_STEPS + 2):
            base[f"layer.{index}"] = weights.bfloat16()
            gradient = torch.randn(len(weights), generator=draw)
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.lerp_(gradient.square_(), 1 - _BETAS[1])
            spread = (square / (1 - _BETAS[1] ** step)).sqrt_().add_(1e-8)
            weights = weights.addcdiv_(mean, spread, value=-learning_rate / (1 - _BETAS[0] ** step))
        target[f"layer.{index}"] = weights.bfloat16()
    return base, target


def shipped_model_trace(learning_rate: float = 1e-6) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """bf16 weights of the shipped model before and after one AdamW step, after `_SHIPPED_WARM_STEPS` such steps.

    Each step pushes random tokens up and down by advantages that are normalised over the batch.
    """
    from paceline.backend.causal_lm import load_causal_lm

    model = load_causal_lm(str(files("paceline") / "assets" / "tiny_model"))
    vocabulary = int(model.config.get_text_config().vocab_size)
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    base: dict[str, torch.Tensor] = {}
    for _ in range(_SHIPPED_WARM_STEPS + 1):
        base = _weights(model)
        tokens = torch.randint(0, vocabulary, (16, 16), generator=draw)
        reward = torch.randn(16, generator=draw)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        logits = model(tokens).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        torch.autograd.backward(-(advantage[:, None] * logp).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return base, _weights(model)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().bfloat16().contiguous() for name, value in model.named_parameters()}
