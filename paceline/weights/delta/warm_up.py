"""All that is compiled for one element type, done before it matters: compiling in the middle of a run would hold up the
decode loop of the same process.
"""

from __future__ import annotations

import torch

from paceline.weights.delta.apply import apply, copy_and_apply, prepare
from paceline.weights.delta.encode import encode, sampled_share
from paceline.weights.delta.message import read_delta
from paceline.weights.delta.planes import Level

_ELEMENTS = 4096
_NO_DIGEST = "0" * 32


def warm_up(dtype: torch.dtype, level: Level) -> None:
    """Encode and apply a small delta between tensors of this type in each way there is."""
    base = {"w": torch.linspace(-1, 1, _ELEMENTS).to(dtype)}
    target = {"w": base["w"].clone()}
    target["w"].view(torch.uint8)[:: 64 * dtype.itemsize] ^= 1
    sampled_share(base, target)
    sent = encode(
        base, target, level, base_version=0, version=1, base_digest=_NO_DIGEST, target_digest=_NO_DIGEST, threads=1
    )
    delta = read_delta(sent.data)
    copy_and_apply(delta, base, {"w": torch.empty_like(base["w"])}, base_digest=_NO_DIGEST)
    prepared = prepare(delta, base, base_digest=_NO_DIGEST)
    apply(prepared, base, prepared.cursor())
