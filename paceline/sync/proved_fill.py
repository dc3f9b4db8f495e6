"""How an engine that owns its memory and lets the replica copy (a `FillableEngine`) takes all of a version.

Each leaf is hashed as it lies in the engine's memory right after it was written there, while the caches have it, so the
proof costs no second read. Stopped anywhere, or found wrong, the memory is neither version: the caller binds the one
before, as after a bind that failed. Possible where every served tensor is dense CPU memory, apart from all others or
the very memory of a tied one, and every tensor was published with a digest. Else the version is bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.errors import DigestMismatch
from paceline.core.ports import InferenceEngine
from paceline.core.weight_ports import FillableEngine
from paceline.sync.covered_weights import CoveredWeights
from paceline.weights.digest import dense_bytes
from paceline.weights.leaf_runs import fill_leaves
from paceline.weights.tree_digest import tensor_digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Part:
    """One memory of the engine: its name there, what is copied to it, and the digest it must have then."""

    name: str
    memory: torch.Tensor
    source: torch.Tensor
    digest: str


class ProvedFill:
    """A version over an engine's memory. States: made -> filled and proved, or torn."""

    def __init__(self, engine: FillableEngine, parts: list[_Part], staged: CoveredWeights) -> None:
        self._engine = engine
        self._parts = parts
        self._copies = staged.copies
        self._version = staged.manifest.version

    def apply(self) -> None:
        """Copy and prove.

        Raises:
            DigestMismatch: what lies in the engine's memory is not the version; all tensors are named.
        """
        pairs = [(dense_bytes(part.source), dense_bytes(part.memory)) for part in self._parts]
        found = [tensor_digest([leaves]).hex() for leaves in fill_leaves(pairs, copies=self._copies)]
        wrong = sorted(part.name for part, digest in zip(self._parts, found, strict=True) if digest != part.digest)
        if wrong:
            raise DigestMismatch(f"{len(wrong)} tensors are not as published after the copy: {', '.join(wrong[:8])}")
        self._engine.filled(self._version)


def proved_fill(engine: InferenceEngine, staged: CoveredWeights) -> ProvedFill | None:
    """The copy, where it is possible."""
    if engine.apply != "copied" or not staged.digest or not isinstance(engine, FillableEngine):
        return None
    served = engine.served_tensors()
    published = {meta.name: meta.digest for meta in staged.manifest.tensors}
    parts: dict[int, _Part] = {}
    for name, source in staged.tensors.items():
        sent = staged.sources[name]
        memory, digest = served.get(name), published[staged.manifest.aliases.get(sent, sent)]
        if memory is None or not digest or not _fits(memory, source):
            return None
        part = parts.setdefault(memory.data_ptr(), _Part(name, memory, source, digest))
        if part.source.data_ptr() != source.data_ptr() or part.memory.shape != memory.shape:
            return None
    ordered = sorted(parts.items())
    if any(begin + part.memory.nbytes > following for (begin, part), (following, _) in pairwise(ordered)):
        return None
    return ProvedFill(engine, [part for part in parts.values() if part.memory.numel()], staged)


def _fits(memory: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        memory.device.type == "cpu"
        and memory.is_contiguous()
        and (memory.shape, memory.dtype) == (source.shape, source.dtype)
    )
