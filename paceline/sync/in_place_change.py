"""How an engine that owns its memory is brought from the version it serves to the next one, without copying it whole.

The staged change touches what differs, tensor after tensor, and remembers how far it came; a tied weight of which the
engine has several copies is changed once and copied to the others. Stopped anywhere, `take_back` restores the version
before, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.core.ports import InferenceEngine
from paceline.core.weight_ports import PatchableEngine, StagedChange
from paceline.sync.covered_weights import CoveredWeights

if TYPE_CHECKING:
    import torch


class InPlaceChange:
    """A staged change over an engine's memory: `own` by stored names, and `copies`, pairs of further memory and the
    stored name of which it holds a copy.
    """

    def __init__(
        self,
        engine: PatchableEngine,
        change: StagedChange,
        own: Mapping[str, torch.Tensor],
        copies: list[tuple[torch.Tensor, str]],
        versions: tuple[int, int],
    ) -> None:
        self._engine = engine
        self._change = change
        self._own = own
        self._copies = copies
        self._before, self._after = versions

    def apply(self) -> None:
        """To the new version."""
        self._change.apply(self._own)
        self._copy()
        self._engine.patched(self._after)

    def take_back(self) -> None:
        """To the version before, from wherever `apply` stopped."""
        self._change.take_back(self._own)
        self._copy()
        self._engine.patched(self._before)

    def _copy(self) -> None:
        for memory, name in self._copies:
            memory.copy_(self._own[name])


def in_place_change(engine: InferenceEngine, staged: CoveredWeights, previous: CoveredWeights) -> InPlaceChange | None:
    """The change, where it is possible: it was staged against what this engine serves, and all of it lies in memory
    that can be changed. None: the version has to be bound.
    """
    change = staged.change
    if engine.apply != "copied" or change is None or not isinstance(engine, PatchableEngine):
        return None
    if staged.base_version != previous.manifest.version or engine.version != previous.manifest.version:
        return None
    served = engine.served_tensors()
    names_of: dict[str, list[str]] = {}
    for name, sent in staged.sources.items():
        names_of.setdefault(staged.manifest.aliases.get(sent, sent), []).append(name)
    own: dict[str, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, str]] = []
    for meta in staged.manifest.tensors:
        memories = {served[name].data_ptr(): served[name] for name in names_of.get(meta.name, [])}
        if not memories or not all(_is_changeable(memory) for memory in memories.values()):
            return None
        own[meta.name], *further = memories.values()
        copies += [(memory, meta.name) for memory in further]
    return InPlaceChange(engine, change, own, copies, (previous.manifest.version, staged.manifest.version))


def _is_changeable(memory: torch.Tensor) -> bool:
    return memory.device.type == "cpu" and memory.is_contiguous()
