"""The name-to-slot plan over a model that fuses, shards, pads, transposes and replicates as inference engines do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from paceline.engine.slot_plan import Group, SlotPlan, plan_slots
from paceline.engine.slot_writer import SlotWriter

HIDDEN, HEADS, HEAD, VOCABULARY = 8, 4, 2, 10


class EngineModel:
    """One of two workers: q, k and v fused (k and v have a single head, which both workers keep), gate and up fused
    row by row, down sharded over its columns, embeddings padded, and one head stored as its transpose.
    """

    def __init__(self, rank: int = 0, *, computed: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._rank = rank
        self._computed = computed or (lambda tensor: tensor)
        sizes = {
            "embed": (16, HIDDEN),
            "qkv": (HEADS * HEAD // 2 + 4 * HEAD, HIDDEN),
            "gate_up": (2 * HIDDEN, HIDDEN),
            "down": (HIDDEN, HIDDEN),
            "norm": (HIDDEN,),
            "score": (HIDDEN, 3),
        }
        self.parameters = {
            name: nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=name == "norm")
            for name, size in sizes.items()
        }
        self.shapes: dict[str, tuple[int, ...]] = {
            "embed": (VOCABULARY, HIDDEN),
            "q": (HEADS * HEAD, HIDDEN),
            "k": (HEAD, HIDDEN),
            "v": (HEAD, HIDDEN),
            "gate": (2 * HIDDEN, HIDDEN),
            "up": (2 * HIDDEN, HIDDEN),
            "down": (HIDDEN, 2 * HIDDEN),
            "norm": (HIDDEN,),
            "score": (3, HIDDEN),
            "extra": (5,),
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half = HEADS * HEAD // 2
        places: dict[str, Callable[[torch.Tensor], None]] = {
            "embed": lambda t: self._put("embed", slice(0, VOCABULARY), t),
            "q": lambda t: self._put("qkv", slice(0, half), t[self._rank * half : (self._rank + 1) * half]),
            "k": lambda t: self._put("qkv", slice(half, half + 2 * HEAD), torch.cat([t, t])),
            "v": lambda t: self._put("qkv", slice(half + 2 * HEAD, half + 4 * HEAD), torch.cat([t, t])),
            "gate": lambda t: self._put("gate_up", slice(0, HIDDEN), t.chunk(2)[self._rank]),
            "up": lambda t: self._put("gate_up", slice(HIDDEN, 2 * HIDDEN), t.chunk(2)[self._rank]),
            "down": lambda t: self._put("down", slice(None), t.chunk(2, dim=1)[self._rank]),
            "norm": lambda t: self._put("norm", slice(None), self._computed(t)),
            "score": lambda t: self._put("score", slice(None), t.t()),
        }
        for name, tensor in weights:
            if name in places:
                places[name](tensor)

    def _put(self, parameter: str, rows: slice, tensor: torch.Tensor) -> None:
        self.parameters[parameter].data[rows].copy_(tensor)
        if parameter == "embed":
            self.parameters[parameter].data[tensor.shape[0] :].fill_(0)

    def plan(self) -> SlotPlan:
        return plan_slots(self.parameters, self.shapes, self.load_weights)

    def values(self) -> dict[str, list[float]]:
        return {name: parameter.flatten().tolist() for name, parameter in self.parameters.items()}


def checkpoint(model: EngineModel, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(torch.bfloat16) for n, shape in model.shapes.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_scattered_changes_give_what_loading_everything_gives(rank: int) -> None:
    model, fresh = EngineModel(rank), EngineModel(rank)
    plan = model.plan()
    assert plan.covers(model.shapes)
    before = checkpoint(model, 0)
    model.load_weights(before.items())
    storages = {name: parameter.data_ptr() for name, parameter in model.parameters.items()}
    after = {}
    for name, tensor in before.items():
        changed = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))) < 0.3
        after[name] = torch.where(changed, tensor + 1, tensor)
        positions = torch.nonzero((after[name] != tensor).flatten())[:, 0]
        for placed in plan.place(name, positions, after[name].flatten()[positions]):
            placed.write({parameter: held.data for parameter, held in model.parameters.items()})
    fresh.load_weights(after.items())
    assert model.values() == fresh.values()
    assert {name: parameter.data_ptr() for name, parameter in model.parameters.items()} == storages


def test_the_dry_run_leaves_every_value_as_it_was() -> None:
    model = EngineModel()
    model.load_weights(checkpoint(model, 3).items())
    values = model.values()
    model.plan()
    assert model.values() == values
    assert {parameter.dtype for parameter in model.parameters.values()} == {torch.bfloat16}
    assert [name for name, parameter in model.parameters.items() if parameter.requires_grad] == ["norm"]


def test_a_loader_that_fails_leaves_every_value_as_it_was() -> None:
    model = EngineModel()
    values = model.values()

    def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        next(iter(weights))
        raise ValueError("unknown tensor")

    with pytest.raises(ValueError, match="unknown tensor"):
        plan_slots(model.parameters, model.shapes, failing)
    assert model.values() == values


def test_replicated_elements_have_a_slot_each_and_foreign_shards_none() -> None:
    plan = EngineModel(rank=1).plan()
    assert [slots.parameter for slots in plan.slots["k"]] == ["qkv", "qkv"]
    assert plan.slots["extra"] == ()
    (q,) = plan.slots["q"]
    inside, places = q.find(torch.tensor([0, HEADS * HEAD * HIDDEN // 2, HEADS * HEAD * HIDDEN - 1]))
    assert inside.tolist() == [False, True, True]
    assert places.tolist() == [0, HEADS * HEAD * HIDDEN // 2 - 1]


@pytest.mark.parametrize("computed", [lambda t: t + 1, lambda t: t * 2, lambda t: t.flip(0) - t, torch.zeros_like])
def test_what_a_loader_computes_has_no_plan(computed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plan = EngineModel(computed=computed).plan()
    assert plan.unplanned == {"norm"}
    assert not plan.covers(["q"])


GROUPS = (
    Group(frozenset({"q", "k", "v"}), frozenset({"qkv"})),
    Group(frozenset({"gate", "up"}), frozenset({"gate_up"})),
    *(Group(frozenset({name}), frozenset({name})) for name in ("embed", "down", "norm", "score")),
    Group(frozenset({"extra"}), frozenset()),
)


def test_a_plan_made_group_by_group_is_the_same() -> None:
    model = EngineModel(rank=1)
    values = model.values()
    plan, whole = plan_slots(model.parameters, model.shapes, model.load_weights, GROUPS), model.plan()
    assert plan.unplanned == whole.unplanned == frozenset()
    for name, runs in whole.slots.items():
        same = [[t.tolist() for t in one.places()] for one in runs]
        assert [[t.tolist() for t in one.places()] for one in plan.slots[name]] == same
    assert model.values() == values


def test_a_tensor_that_reaches_another_group_is_found_out() -> None:
    model = EngineModel()
    values = model.values()
    wrong = [Group(frozenset({"q", "k"}), frozenset({"qkv"})), Group(frozenset({"v"}), frozenset({"norm"}))]
    with pytest.raises(RuntimeError):
        plan_slots(model.parameters, model.shapes, model.load_weights, wrong)
    assert model.values() == values
    before = checkpoint(model, 0)
    model.load_weights(before.items())
    assert not SlotWriter(model.parameters, model.load_weights, wrong).learn(before)


def test_padding_that_a_loader_fills_is_no_slot_and_stays() -> None:
    model = EngineModel()
    (embed,) = model.plan().slots["embed"]
    assert sorted(embed.places()[1].tolist()) == list(range(VOCABULARY * HIDDEN))


def test_padding_before_a_tensor_and_tensors_in_a_row_are_told_apart() -> None:
    parameters = {"p": nn.Parameter(torch.zeros(9), requires_grad=False)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameters["p"].data["ab".index(name) * 3 + 2 :][:3].copy_(tensor)

    plan = plan_slots(parameters, {"a": (3,), "b": (3,)}, load)
    assert [[t.tolist() for t in slots.places()] for slots in (*plan.slots["a"], *plan.slots["b"])] == [
        [[0, 1, 2], [2, 3, 4]],
        [[0, 1, 2], [5, 6, 7]],
    ]


def test_other_parameters_than_those_planned_are_noticed() -> None:
    model = EngineModel()
    writer = SlotWriter(model.parameters, model.load_weights)
    assert writer.writes_into(dict(model.parameters))
    assert not writer.writes_into({**model.parameters, "norm": nn.Parameter(torch.zeros(HIDDEN))})


def test_a_parameter_that_is_not_dense_has_no_plan() -> None:
    model = EngineModel()
    before = checkpoint(model, 0)
    model.load_weights(before.items())
    model.parameters["score"].data = model.parameters["score"].data.t().contiguous().t()
    assert not SlotWriter(model.parameters, model.load_weights).learn(before)


def test_a_parameter_that_nothing_reaches_has_no_plan() -> None:
    model = EngineModel()
    model.parameters["lonely"] = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert model.plan().unplanned == {"lonely"}


def test_a_writer_changes_in_place_what_the_plan_proves() -> None:
    model, fresh = EngineModel(), EngineModel()
    before = checkpoint(model, 0)
    model.load_weights(before.items())
    writer = SlotWriter(model.parameters, model.load_weights)
    assert writer.learn(before)
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["q"][3, 2] += 1
    after["down"][:, 1] += 1
    changes = writer.prepare(before, after, ["q", "down", "norm"])
    assert changes is not None
    assert writer.write(changes) == 1 + HIDDEN
    fresh.load_weights(after.items())
    assert model.values() == fresh.values()
    assert writer.agrees(after)
    assert not writer.agrees(before)


def test_where_most_has_changed_nothing_is_prepared() -> None:
    model = EngineModel()
    before, after = checkpoint(model, 0), checkpoint(model, 1)
    model.load_weights(before.items())
    writer = SlotWriter(model.parameters, model.load_weights)
    assert writer.learn(before)
    assert writer.prepare(before, after, list(after)) is None


def test_parameters_that_are_not_what_the_plan_says_are_never_written() -> None:
    model = EngineModel()
    before = checkpoint(model, 0)
    model.load_weights(before.items())
    model.parameters["gate_up"].data = model.parameters["gate_up"].data.flip(0).contiguous()  # packed after loading
    writer = SlotWriter(model.parameters, model.load_weights)
    assert not writer.learn(before)
    assert writer.prepare(before, before, ["q"]) is None
