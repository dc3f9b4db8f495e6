"""The name-to-slot plan: where each element of each checkpoint tensor lies in an engine's parameters.

Fused, stacked, sharded and replicated parameters are all the same here: the engine's own `load_weights` is run once on
tensors of indices, and what it wrote is read back. A second run on other indices tells apart what was moved from what
was computed: a loader that calculates has no plan. With the plan, changed elements are written in place; parameters
keep their storage.

    dry run      parameters hold int64 for its time, 8 bytes an element, on the CPU
    slots        runs (source start, target start, length), so a row-sharded matrix takes a run per row
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# The other indices of the second run: whatever is computed of an index is not the scrambled form of the result.
_FACTOR, _OFFSET, _MASK = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, (1 << 62) - 1


@dataclass(frozen=True)
class Slots:
    """Runs of one checkpoint tensor in one parameter: element `source[i] + k` of the tensor lies at `target[i] + k` of
    the parameter, for k below `length[i]`. int64, ascending by `source`, not overlapping.
    """

    parameter: str
    source: torch.Tensor
    target: torch.Tensor
    length: torch.Tensor

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of these elements (flat positions, int64) lie here, as a mask, and where: flat places of those."""
        run = torch.searchsorted(self.source, positions, right=True) - 1
        known = run.clamp(min=0)
        inside = (run >= 0) & (positions - self.source[known] < self.length[known])
        chosen = known[inside]
        return inside, positions[inside] - self.source[chosen] + self.target[chosen]

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All flat positions of the checkpoint tensor that lie here, and their flat places."""
        within = torch.arange(int(self.length.sum()), device=self.length.device)
        within -= torch.repeat_interleave(self.length.cumsum(0) - self.length, self.length)
        return (
            torch.repeat_interleave(self.source, self.length) + within,
            torch.repeat_interleave(self.target, self.length) + within,
        )

    def to(self, device: torch.device) -> Slots:
        """The same on another device."""
        return Slots(self.parameter, self.source.to(device), self.target.to(device), self.length.to(device))


@dataclass(frozen=True)
class SlotPlan:
    """`slots` by checkpoint name; a name may have several (replicated heads), or none (a shard of another worker).
    `unplanned` are parameters that a loader computes, or that no checkpoint tensor reaches.
    """

    slots: Mapping[str, tuple[Slots, ...]]
    unplanned: frozenset[str]

    def covers(self, names: Iterable[str]) -> bool:
        """Whether changes of these checkpoint tensors can be written in place."""
        return not self.unplanned and set(names) <= self.slots.keys()

    def scatter(
        self, parameters: Mapping[str, torch.Tensor], name: str, positions: torch.Tensor, values: torch.Tensor
    ) -> int:
        """Write changed elements of one checkpoint tensor; returns how many were written.

        `positions` are flat (int64), `values` have the parameter's type; both on its device.
        """
        written = 0
        for slots in self.slots[name]:
            inside, places = slots.find(positions)
            parameters[slots.parameter].view(-1)[places] = values[inside]
            written += int(places.numel())
        return written


def plan_slots(
    parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, tuple[int, ...]], load: Load
) -> SlotPlan:
    """Make the plan. `shapes` are those of the checkpoint; `load` is the engine's, over `parameters`.

    The parameters hold their own values again when this returns, whatever happens.
    """
    firsts: dict[str, int] = {}
    total = 0
    for name, shape in shapes.items():
        firsts[name] = total
        total += torch.Size(shape).numel()
    plain = _dry_run(parameters, shapes, firsts, load, lambda indices: indices)
    scrambled = _dry_run(parameters, shapes, firsts, load, _scrambled)
    runs: dict[str, list[Slots]] = {name: [] for name in shapes}
    unplanned: set[str] = set()
    starts = torch.tensor(list(firsts.values()), dtype=torch.int64)
    for parameter, indices in plain.items():
        if not _moved(indices, scrambled[parameter], total):
            unplanned.add(parameter)
            continue
        for name, slots in _runs_of(parameter, indices, list(shapes), starts):
            runs[name].extend(slots)
    return SlotPlan({name: tuple(slots) for name, slots in runs.items()}, frozenset(unplanned))


def _dry_run(
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    firsts: Mapping[str, int],
    load: Load,
    label: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What every parameter holds after indices were loaded; -1 where nothing was."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.data = torch.full(parameter.shape, -1, dtype=torch.int64)
        load(
            (name, label(torch.arange(torch.Size(shape).numel()) + firsts[name]).view(shape))
            for name, shape in shapes.items()
        )
        return {name: parameter.data.reshape(-1).clone() for name, parameter in parameters.items()}
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _scrambled(indices: torch.Tensor) -> torch.Tensor:
    return (indices * _FACTOR + _OFFSET) & _MASK


def _moved(plain: torch.Tensor, scrambled: torch.Tensor, total: int) -> bool:
    """Whether each element was copied from somewhere, or is padding that nothing was loaded into."""
    if plain.dtype != torch.int64 or scrambled.dtype != torch.int64:
        return False
    loaded = plain >= 0
    right = (plain < total) & (scrambled == _scrambled(plain))
    return bool(loaded.any()) and bool((right | ~loaded & (scrambled == plain)).all())


def _runs_of(
    parameter: str, indices: torch.Tensor, names: list[str], starts: torch.Tensor
) -> Iterable[tuple[str, list[Slots]]]:
    """The runs of one parameter, by the checkpoint tensor that they come from."""
    owner = torch.searchsorted(starts, indices, right=True) - 1
    breaks = torch.ones(indices.numel(), dtype=torch.bool)
    breaks[1:] = (indices[1:] != indices[:-1] + 1) | (owner[1:] != owner[:-1])
    target = torch.nonzero(breaks)[:, 0]
    length = torch.diff(target, append=torch.tensor([indices.numel()]))
    source, owner = indices[target], owner[target]
    kept = source >= 0
    target, length, source, owner = target[kept], length[kept], source[kept], owner[kept]
    for number in sorted(set(owner.tolist())):
        mine = owner == number
        first = int(starts[number])
        yield names[number], _without_overlap(parameter, source[mine] - first, target[mine], length[mine])


def _without_overlap(parameter: str, source: torch.Tensor, target: torch.Tensor, length: torch.Tensor) -> list[Slots]:
    """Runs in ascending order, dealt out so that none of one `Slots` overlap: a copy each for replicated elements."""
    order = torch.argsort(source, stable=True)
    source, target, length = source[order], target[order], length[order]
    made: list[Slots] = []
    while source.numel():
        ends = source + length
        chosen = torch.ones(source.numel(), dtype=torch.bool)
        if bool((source[1:] < ends[:-1]).any()):
            chosen[:] = False
            reached = -1
            for place, (start, end) in enumerate(zip(source.tolist(), ends.tolist(), strict=True)):
                if start >= reached:
                    chosen[place], reached = True, end
        made.append(Slots(parameter, source[chosen], target[chosen], length[chosen]))
        source, target, length = source[~chosen], target[~chosen], length[~chosen]
    return made
