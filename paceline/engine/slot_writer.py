"""SlotWriter: brings an engine's parameters from one version to the next by writing the elements that differ.

What differs is found beside generation (`prepare`), inside the pause it is only scattered (`write`). Nothing is written
by a plan that was not proved: after it is made, every element that it names has to be what was loaded. So a model whose
weights are packed, scaled or reordered after loading is found out, and reloaded whole instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import PacelineError
from paceline.engine.slot_plan import Group, Placed, SlotPlan, plan_slots

MOST_CHANGED = 0.25  # beyond it, loading whole layers moves fewer bytes


@dataclass(frozen=True)
class Changes:
    """What goes where, on the parameters' device."""

    placed: Sequence[Placed]


class SlotWriter:
    """Over one engine's parameters and its own `load_weights`; `groups` are those of `plan_slots`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
        groups: Sequence[Group] = (),
    ) -> None:
        self._parameters = parameters
        self._load = load
        self._groups = groups
        self._plan: SlotPlan | None = None

    def learn(self, loaded: Mapping[str, torch.Tensor]) -> bool:
        """Make the plan; `loaded` is what the parameters hold now. Returns whether it can be trusted."""
        shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
        if not all(parameter.is_contiguous() for parameter in self._parameters.values()):
            return False
        try:
            plan = plan_slots(self._parameters, shapes, self._load, self._groups)
        except (PacelineError, ValueError, RuntimeError, AssertionError, KeyError):
            return False  # a loader that does not take indices has no plan
        self._plan = plan if plan.covers(loaded) else None
        if self._plan is not None and not self.agrees(loaded):
            self._plan = None
        return self._plan is not None

    def agrees(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether every element that has a slot is there, bit for bit."""
        return self._plan is not None and all(self._agrees(self._plan, name, tensors[name]) for name in tensors)

    def prepare(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], names: Iterable[str]
    ) -> Changes | None:
        """What to write to get from one version to the other; None: there is no plan, or too much differs."""
        if self._plan is None:
            return None
        placed: list[Placed] = []
        changed, total = 0, 0
        for name in names:
            old, new = _bits(before[name]), _bits(after[name])
            positions = torch.nonzero(old != new)[:, 0]
            changed, total = changed + positions.numel(), total + new.numel()
            found = self._plan.place(name, positions, after[name].reshape(-1)[positions])
            placed += [one.to(self._parameters[one.parameter].device) for one in found]
        return Changes(placed) if changed <= MOST_CHANGED * total else None

    def write(self, changes: Changes) -> int:
        """Scatter; returns how many elements were written."""
        parameters = {name: parameter.data for name, parameter in self._parameters.items()}
        return sum(one.write(parameters) for one in changes.placed)

    def writes_into(self, parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        """Whether these are still the parameters that this writes into."""
        return parameters.keys() == self._parameters.keys() and all(
            parameter is self._parameters[name] for name, parameter in parameters.items()
        )

    def _agrees(self, plan: SlotPlan, name: str, tensor: torch.Tensor) -> bool:
        for slots in plan.slots[name]:
            parameter = self._parameters[slots.parameter].data
            if parameter.dtype != tensor.dtype:
                return False
            wanted, held = slots.both(_bits(tensor), _bits(parameter))
            if not torch.equal(held.cpu(), wanted):
                return False
        return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The flat bit patterns: NaNs compare, and -0 differs from 0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().reshape(-1).view(whole)
