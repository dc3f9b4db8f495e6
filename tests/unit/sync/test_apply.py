"""Apply as a stated capability: mapped and copied, each proved, each with its rollback (V1, V6, C07, C08)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.sync.covered_weights import CoveredWeights
from paceline.testing.marker_model import MarkerEngine
from paceline.testing.publication import publish
from paceline.testing.weight_memory import OwnedWeights, PointedWeights, WeightMemory
from paceline.weights.coverage import CoverageRules
from paceline.weights.digest import digest_tensors
from tests.unit.sync.fleet import Fleet, make_fleet

MEMORIES: dict[str, Callable[[], WeightMemory]] = {"mapped": PointedWeights, "copied": OwnedWeights}


def swap_in(fleet: Fleet, engine: MarkerEngine, n: int) -> str:
    manifest = fleet.publish(n)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    previous = fleet.transaction.swap(fleet.swap_command(manifest), engine)
    if previous is not None:
        previous.release()
    return manifest.digest


def served_digest(engine: MarkerEngine) -> str:
    return digest_tensors(engine.served_tensors(), {"head": "weight"})


@pytest.mark.parametrize("kind", MEMORIES)
def test_every_version_is_served_byte_by_byte(kind: str) -> None:
    fleet, engine = make_fleet(arenas=2), MarkerEngine(memory=MEMORIES[kind]())
    assert engine.apply == kind
    for n in range(4):
        digest = swap_in(fleet, engine, n)
        assert served_digest(engine) == digest
        assert engine.marker == n
        assert fleet.transaction.report().digest == digest
        fleet.backend.update(None)  # type: ignore[arg-type]


def test_an_engine_that_owns_its_memory_keeps_its_addresses_and_unties_what_was_sent_as_one() -> None:
    fleet, engine = make_fleet(), MarkerEngine(memory=OwnedWeights())
    swap_in(fleet, engine, 0)
    before = {name: tensor.data_ptr() for name, tensor in engine.served_tensors().items()}
    fleet.backend.update(None)  # type: ignore[arg-type]
    swap_in(fleet, engine, 1)
    assert {name: tensor.data_ptr() for name, tensor in engine.served_tensors().items()} == before
    assert before["head"] != before["weight"]
    assert torch.equal(engine.served_tensors()["head"], engine.served_tensors()["weight"])


def says_something(fleet: Fleet) -> bool:
    return fleet.board.served is not None


def test_before_memory_is_overwritten_what_was_said_of_it_is_withdrawn() -> None:
    memory = OwnedWeights()
    fleet, engine = make_fleet(), MarkerEngine(memory=memory)
    swap_in(fleet, engine, 0)
    fleet.transaction.announce(engine)
    assert says_something(fleet)
    fleet.backend.update(None)  # type: ignore[arg-type]
    swap_in(fleet, engine, 1)
    assert not says_something(fleet)
    fleet.transaction.announce(engine)
    fleet.backend.update(None)  # type: ignore[arg-type]
    manifest = fleet.publish(2)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    memory.fail_at = "head"
    with pytest.raises(SyncError, match="boom in head"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    # Rolled back, and said again.
    assert [version for version, _ in fleet.board.published] == [Version(1, 0).packed, *[Version(1, 1).packed] * 2]
    said = fleet.board.served
    assert said is not None
    assert digest_tensors(said, manifest.aliases) == fleet.transaction.report().digest


def test_an_engine_that_points_says_what_it_serves_until_it_says_something_else() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    swap_in(fleet, engine, 0)
    fleet.transaction.announce(engine)
    fleet.backend.update(None)  # type: ignore[arg-type]
    swap_in(fleet, engine, 1)
    assert says_something(fleet)


@pytest.mark.parametrize("name", ["marker", "weight", "head"])
def test_a_copy_that_fails_half_way_is_rolled_back_byte_by_byte(name: str) -> None:
    memory = OwnedWeights()
    fleet, engine = make_fleet(), MarkerEngine(memory=memory)
    old = swap_in(fleet, engine, 0)
    fleet.backend.update(None)  # type: ignore[arg-type]
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    memory.fail_at = name
    with pytest.raises(SyncError, match=f"replica-0 failed binding weights: ValueError: boom in {name}"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert served_digest(engine) == old
    assert (engine.marker, engine.version) == (0, Version(1, 0).packed)
    assert fleet.transaction.report().state == "ready"
    assert fleet.transaction.report().version == Version(1, 0).packed
    # The next try of the same version succeeds without a restart (C08).
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert served_digest(engine) == manifest.digest


def test_a_wrong_byte_in_the_engines_memory_is_found_and_the_old_version_comes_back() -> None:
    memory = OwnedWeights()
    fleet, engine = make_fleet(), MarkerEngine(memory=memory)
    swap_in(fleet, engine, 0)
    fleet.backend.update(None)  # type: ignore[arg-type]
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    memory.corrupt = "head"
    with pytest.raises(DigestMismatch, match="does not serve the staged bytes of 1 tensors: head"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    # The fault is in the engine: the old version cannot be proved either.
    assert fleet.transaction.report().state == "fenced"
    assert fleet.transaction.report().version == Version(1, 0).packed


def test_a_first_version_that_fails_leaves_the_replica_joining() -> None:
    memory = OwnedWeights()
    fleet, engine = make_fleet(), MarkerEngine(memory=memory)
    manifest = fleet.publish(0)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    memory.fail_at = "weight"
    with pytest.raises(SyncError, match="boom in weight"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert fleet.transaction.report().state == "joining"
    assert fleet.transaction.report().version is None


# ---- the coverage contract comes before everything ------------------------------------------------------------------


class WiderEngine(MarkerEngine):
    """Serves from one tensor more than the trainer sends."""

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {**super().expected_tensors(), "layers.0.bias": ("float32", (4,))}


def test_a_mismatch_is_refused_before_anything_is_fetched() -> None:
    fleet, engine = make_fleet(), WiderEngine()
    manifest = fleet.publish(0)
    with pytest.raises(CoverageError, match=r"'layers.0.bias' is missing"):
        fleet.transaction.stage(fleet.stage_command(manifest), engine)
    assert list(fleet.exchange.arenas[manifest.arena_id].holders) == []
    assert fleet.transaction.report().state == "joining"


SQUARE = {"marker": ("float32", (1,)), "weight": ("float32", (4, 4)), "head": ("float32", (4, 4))}


class SquareEngine(MarkerEngine):
    """The marker model with a square matrix, of which a transposed view has the same address, shape and bytes."""

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return SQUARE

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._memory.put(tensors)
        self._version = version


class TurningEngine(SquareEngine):
    """Reads what it points at in column-major order from the second version on."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        turned = {name: tensor.t() for name, tensor in tensors.items()}
        super().bind(tensors if self.version is None else turned, version)


def publish_square(fleet: Fleet, n: int) -> WeightManifest:
    weight = torch.arange(16.0).view(4, 4) + n
    named = [("marker", torch.full((1,), float(n))), ("weight", weight), ("head", weight)]
    return publish(fleet.sender, named, Version(1, n).packed)


def test_pointers_in_another_order_of_elements_are_no_proof() -> None:
    fleet, engine = make_fleet(), TurningEngine()
    first = publish_square(fleet, 0)
    fleet.transaction.stage(fleet.stage_command(first), engine)
    fleet.transaction.swap(fleet.swap_command(first), engine)
    second = publish_square(fleet, 1)
    fleet.transaction.stage(fleet.stage_command(second), engine)
    with pytest.raises(DigestMismatch, match="does not serve the staged bytes of 2 tensors: head, weight"):
        fleet.transaction.swap(fleet.swap_command(second), engine)


def test_memory_in_another_order_of_elements_is_refused_before_anything_is_fetched() -> None:
    memory = OwnedWeights()
    fleet, engine = make_fleet(), SquareEngine(memory=memory)
    first = publish_square(fleet, 0)
    fleet.transaction.stage(fleet.stage_command(first), engine)
    fleet.transaction.swap(fleet.swap_command(first), engine)
    memory.turn("head")
    second = publish_square(fleet, 1)
    with pytest.raises(CoverageError, match=r"'head' is row-major, the engine's 'head' has strides \[1, 4\]"):
        fleet.transaction.stage(fleet.stage_command(second), engine)
    assert list(fleet.exchange.arenas[second.arena_id].holders) == []
    assert fleet.transaction.report().version == first.version
    assert engine.marker == 0


def test_memory_that_is_in_another_order_only_once_it_is_made_is_not_served() -> None:
    memory = OwnedWeights()
    memory.turn("head")
    fleet, engine = make_fleet(), SquareEngine(memory=memory)
    manifest = publish_square(fleet, 0)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    with pytest.raises(DigestMismatch, match="1 tensors: head"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert fleet.transaction.report().state == "joining"


class PlainEngine(MarkerEngine):
    """Knows the marker model's tensors without the trainer's prefix, and no head."""

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: shape for name, shape in super().expected_tensors().items() if name != "marker"}

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._memory.put(tensors)
        self._version = version


def test_declared_names_reach_the_engine_and_the_proof_is_of_what_was_sent() -> None:
    rules = CoverageRules((("module.", ""),), trainer_only=("marker",))
    fleet, engine = make_fleet(rules=rules), PlainEngine()
    weight = torch.arange(8.0)
    named = [("marker", torch.zeros(1)), ("module.weight", weight), ("module.head", weight)]
    manifest = publish(fleet.sender, named, Version(1, 0).packed)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert set(engine.served_tensors()) == {"weight", "head"}
    fleet.transaction.announce(engine)
    assert fleet.board.published == [(manifest.version, manifest.digest)]
    assert fleet.board.served is not None
    assert digest_tensors(fleet.board.served, manifest.aliases) == manifest.digest


class StageEngine(SquareEngine):
    """One stage of a pipeline: it has one of the two names of a tied weight and knows nothing of the other."""

    def __init__(self, name: str, memory: WeightMemory) -> None:
        super().__init__(memory=memory)
        self._only = name

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {self._only: SQUARE[self._only]}


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("name", ["weight", "head"])
def test_c05_a_stage_that_has_one_name_of_a_tie_gets_every_version(name: str, kind: str) -> None:
    fleet, engine = make_fleet(rules=CoverageRules(trainer_only=("marker",))), StageEngine(name, MEMORIES[kind]())
    for n in range(3):
        manifest = publish_square(fleet, n)
        fleet.transaction.stage(fleet.stage_command(manifest), engine)
        previous = fleet.transaction.swap(fleet.swap_command(manifest), engine)
        if previous is not None:
            previous.release()
        assert torch.equal(engine.served_tensors()[name], torch.arange(16.0).view(4, 4) + n)
        fleet.transaction.announce(engine)
        assert fleet.board.served is not None
        assert digest_tensors(fleet.board.served, manifest.aliases) == manifest.digest


def test_released_weights_leave_nothing_in_the_hands_of_who_kept_the_mapping() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    manifest = fleet.publish(0)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    serving = fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert serving is None
    staged = fleet.transaction.serving
    assert isinstance(staged, CoveredWeights)
    kept = staged.tensors
    staged.release()
    assert kept == {}
