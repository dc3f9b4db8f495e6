"""Names and shapes of a real model, cut or grown to a size: Qwen2.5-0.5B.

The numbers are those of its published configuration (hidden 896, MLP 4864, 14 query and 2 key/value heads of 64, a bias
on q, k and v, vocabulary 151936, tied embeddings, 24 layers, all in bfloat16). Here it has as many layers as reach the
size asked for; a size below the embedding plus one layer cuts the vocabulary instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.errors import ConfigError

HIDDEN = 896
INTERMEDIATE = 4864
QUERY_ROWS = 14 * 64
KEY_VALUE_ROWS = 2 * 64
VOCABULARY = 151936
BYTES_PER_ELEMENT = 2
SMALLEST_GIB = 0.03
PROBE_BYTES = 256 << 20  # most bytes that a plain copy of the benchmark moves, larger than the caches
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShapes:
    """`stored` has every tensor once; `HEAD` is a second name of `EMBEDDING`."""

    layers: int
    stored: dict[str, Shape]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        return BYTES_PER_ELEMENT * sum(math.prod(shape) for shape in self.stored.values())


def shapes_of(gib: float) -> ModelShapes:
    """The model whose bfloat16 weights reach `gib` GiB.

    Raises:
        ConfigError: it would have less than one layer.
    """
    if not math.isfinite(gib) or gib < SMALLEST_GIB:
        raise ConfigError(f"--gib must be at least {SMALLEST_GIB}: one layer and some of the vocabulary")
    elements = math.ceil(gib * (1 << 30) / BYTES_PER_ELEMENT)
    layer = sum(math.prod(shape) for shape in _layer(0).values())
    beside_layers = HIDDEN * (VOCABULARY + 1)
    layers = max(1, math.ceil((elements - beside_layers) / layer))
    rows = VOCABULARY if layers > 1 else min(VOCABULARY, math.ceil((elements - layer) / HIDDEN) - 1)
    stored: dict[str, Shape] = {EMBEDDING: (rows, HIDDEN)}
    for index in range(layers):
        stored |= _layer(index)
    stored["model.norm.weight"] = (HIDDEN,)
    return ModelShapes(layers, stored)


def _layer(index: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (QUERY_ROWS, HIDDEN),
        "self_attn.q_proj.bias": (QUERY_ROWS,),
        "self_attn.k_proj.weight": (KEY_VALUE_ROWS, HIDDEN),
        "self_attn.k_proj.bias": (KEY_VALUE_ROWS,),
        "self_attn.v_proj.weight": (KEY_VALUE_ROWS, HIDDEN),
        "self_attn.v_proj.bias": (KEY_VALUE_ROWS,),
        "self_attn.o_proj.weight": (HIDDEN, QUERY_ROWS),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}
