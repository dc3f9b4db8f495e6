"""The name-to-slot plan: where each element of each checkpoint tensor lies in an engine's parameters.

Fused, stacked, sharded and replicated parameters are all the same here: the engine's own `load_weights` is run once on
tensors of indices, and what it wrote is read back. A second run on other indices tells apart what was moved from what
was computed: a loader that calculates has no plan. What it fills by itself (padding) is no slot. With the plan, changed
elements are written in place; parameters keep their storage.

    dry run      a group at a time; its parameters hold int32 for that time, on the CPU
    slots        runs (source start, target start, length), so a row-sharded matrix takes a run per row
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# The other indices of the second run, modulo 2^32: whatever is computed of an index is not the scrambled form of the
# result. Since both are odd, no index is its own scrambled form.
_FACTOR, _OFFSET = 0x1E3779B9, 0x2545F491
_MOST = 2**31 - 1


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
        within = torch.arange(int(self.length.sum()))
        within -= torch.repeat_interleave(self.length.cumsum(0) - self.length, self.length)
        return (
            torch.repeat_interleave(self.source, self.length) + within,
            torch.repeat_interleave(self.target, self.length) + within,
        )

    def both(self, tensor: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same elements of the flat checkpoint tensor and of the flat parameter: views where runs are regular."""
        size = int(self.length[0])
        steps = [_step(self.source), _step(self.target)]
        if all(step is not None for step in steps) and bool((self.length == size).all()):
            shape = (self.length.numel(), size)
            return (
                tensor.as_strided(shape, (steps[0] or 0, 1), tensor.storage_offset() + int(self.source[0])),
                parameter.as_strided(shape, (steps[1] or 0, 1), parameter.storage_offset() + int(self.target[0])),
            )
        positions, places = self.places()
        return tensor[positions], parameter[places.to(parameter.device)]


@dataclass(frozen=True)
class Placed:
    """Values for flat places (int64) of one parameter, both on the same device."""

    parameter: str
    places: torch.Tensor
    values: torch.Tensor

    def to(self, device: torch.device) -> Placed:
        """The same on another device."""
        return Placed(self.parameter, self.places.to(device), self.values.to(device))

    def write(self, parameters: Mapping[str, torch.Tensor]) -> int:
        """Scatter into the parameter, which has the values' type and device; returns how many were written."""
        parameters[self.parameter].view(-1)[self.places] = self.values
        return int(self.places.numel())


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

    def place(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> list[Placed]:
        """Where elements of one checkpoint tensor go. `positions` are flat (int64) and on the CPU, as `values` are."""
        found = [(slots.parameter, *slots.find(positions)) for slots in self.slots[name]]
        return [Placed(parameter, places, values[inside]) for parameter, inside, places in found]


@dataclass(frozen=True)
class Group:
    """Checkpoint tensors that can be loaded by themselves, and the parameters that they reach."""

    names: frozenset[str]
    parameters: frozenset[str]


def plan_slots(
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    load: Load,
    groups: Sequence[Group] = (),
) -> SlotPlan:
    """Make the plan. `shapes` are those of the checkpoint; `load` is the engine's, over `parameters`. With `groups` it
    is called with the tensors of one after another; without them with all at once.

    The parameters hold their own values again when this returns, whatever happens.

    Raises:
        RuntimeError: a tensor reaches a parameter that is not of its group; whatever the loader raises.
    """
    runs: dict[str, list[Slots]] = {name: [] for name in shapes}
    unplanned = set(parameters)
    for group in groups or [Group(frozenset(shapes), frozenset(parameters))]:
        own = {name: shape for name, shape in shapes.items() if name in group.names}
        firsts, total = _firsts(own)
        plain = _dry_run(parameters, group, own, firsts, load, lambda indices: indices)
        scrambled = _dry_run(parameters, group, own, firsts, load, _scrambled)
        starts = torch.tensor(list(firsts.values()), dtype=torch.int64)
        for parameter, indices in plain.items():
            planned = _planned(indices, scrambled[parameter], total)
            if planned is not None:
                unplanned.discard(parameter)
                for name, slots in _runs_of(parameter, planned, list(own), starts):
                    runs[name].extend(slots)
    return SlotPlan({name: tuple(slots) for name, slots in runs.items()}, frozenset(unplanned))


def _firsts(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """The index of each tensor's first element, and one above the last. Between tensors, and after the -1 of padding,
    one is left out, so that what follows one another is of one tensor.

    Raises:
        ValueError: there are too many for int32.
    """
    firsts: dict[str, int] = {}
    total = 1
    for name, shape in shapes.items():
        firsts[name] = total
        total += torch.Size(shape).numel() + 1
    if total > _MOST:
        raise ValueError(f"{total} elements in one group are too many for a plan")
    return firsts, total


def _dry_run(
    parameters: Mapping[str, torch.nn.Parameter],
    group: Group,
    shapes: Mapping[str, tuple[int, ...]],
    firsts: Mapping[str, int],
    load: Load,
    label: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What every parameter of the group holds after indices were loaded; -1 where nothing was."""
    own = {name: (parameter.data, parameter.requires_grad) for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(False)  # integers have no gradients
            if name in group.parameters:
                parameter.data = torch.full(parameter.shape, -1, dtype=torch.int32)
            else:  # one element for all: torch refuses to write there
                parameter.data = torch.zeros(1, dtype=torch.int32).expand(parameter.shape)
        load(
            (name, label(_indices(firsts[name], torch.Size(shape).numel())).view(shape))
            for name, shape in shapes.items()
        )
        return {name: parameters[name].data.reshape(-1) for name in sorted(group.parameters)}
    finally:
        for name, parameter in parameters.items():
            parameter.data, parameter.requires_grad = own[name]


def _indices(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32)


def _scrambled(indices: torch.Tensor) -> torch.Tensor:
    return (indices * _FACTOR).add_(_OFFSET)


def _step(starts: torch.Tensor) -> int | None:
    """How far apart they are, where all are equally far; 0 for a single one."""
    if starts.numel() == 1:
        return 0
    steps = torch.diff(starts)
    step = int(steps[0])
    return step if step >= 0 and bool((steps == step).all()) else None


def _planned(plain: torch.Tensor, scrambled: torch.Tensor, total: int) -> torch.Tensor | None:
    """Where each element was copied from, -1 for padding: nothing was loaded there, or the same whatever was loaded.
    None: something is neither, or nothing was copied.
    """
    if plain.dtype != torch.int32 or scrambled.dtype != torch.int32:
        return None
    copied = scrambled == _scrambled(plain)
    if not bool(copied.all()):
        if not bool(copied.any()) or not bool((copied | (scrambled == plain)).all()):
            return None
        plain = torch.where(copied, plain, -1)
    least, most = plain.aminmax()
    return plain if int(least) >= -1 and int(most) < total else None


def _runs_of(
    parameter: str, indices: torch.Tensor, names: list[str], starts: torch.Tensor
) -> Iterable[tuple[str, list[Slots]]]:
    """The runs of one parameter, by the checkpoint tensor that they come from."""
    breaks = torch.ones(indices.numel(), dtype=torch.bool)
    breaks[1:] = torch.diff(indices) != 1
    target = torch.nonzero(breaks)[:, 0]
    length = torch.diff(target, append=torch.tensor([indices.numel()]))
    source = indices[target].to(torch.int64)
    owner = torch.searchsorted(starts, source, right=True) - 1
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
