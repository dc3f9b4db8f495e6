"""Versions copied by the replica itself: proved on the way, rolled back if wrong, bound where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from msgspec.structs import replace

from paceline.checkpoint_engine.in_process import InProcessReceiver
from paceline.checkpoint_engine.verification import VerifyMode
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.sync.covered_weights import CoveredWeights
from paceline.sync.proved_fill import proved_fill
from paceline.testing.marker_model import MarkerEngine
from paceline.testing.weight_memory import OwnedWeights
from paceline.weights.coverage import CoverageRules, plan_coverage
from paceline.weights.digest import digest_tensors
from paceline.weights.layout import views_of
from tests.unit.sync.fleet import Fleet, make_fleet


class FilledEngine(MarkerEngine):
    """Owns its memory and lets others fill it; counts how versions came, and refuses as many fills as it is told to."""

    def __init__(self) -> None:
        self.memory = OwnedWeights()
        super().__init__(memory=self.memory)
        self.binds = 0
        self.fills: list[int] = []
        self.refuse = 0

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self.binds += 1
        super().bind(tensors, version)

    def filled(self, version: int) -> None:
        if self.refuse:
            self.refuse -= 1
            raise ValueError("boom in the cache")
        self.fills.append(version)
        self.patched(version)

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.shown(super().served_tensors())

    shown: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = staticmethod(lambda tensors: tensors)


def staged_next(fleet: Fleet, engine: MarkerEngine) -> WeightManifest:
    """The replica serves version 0; version 1 is staged."""
    first = fleet.publish(0)
    fleet.transaction.stage(fleet.stage_command(first), engine)
    fleet.transaction.swap(fleet.swap_command(first), engine)
    fleet.backend.update(None)  # type: ignore[arg-type]
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    return manifest


def served_digest(engine: MarkerEngine) -> str:
    return digest_tensors(engine.served_tensors(), {"head": "weight"})


def test_the_first_version_is_bound_and_the_next_one_is_copied_by_the_replica() -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    places = {name: tensor.data_ptr() for name, tensor in engine.served_tensors().items()}
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert (engine.binds, engine.fills) == (1, [manifest.version])
    assert served_digest(engine) == manifest.digest == fleet.transaction.report().digest
    assert {name: tensor.data_ptr() for name, tensor in engine.served_tensors().items()} == places
    assert (engine.marker, engine.version) == (1, Version(1, 1).packed)
    assert fleet.transaction.report().state == "ready"


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_bit_that_flips_after_it_was_staged_is_found_and_the_version_before_is_served(place: int) -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    old = served_digest(engine)
    staged = views_of(fleet.exchange.find(manifest).buffer, manifest)["weight"].view(torch.uint8)
    staged[place] ^= 4
    with pytest.raises(DigestMismatch, match=r"2 tensors are not as published after the copy: head, weight"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert (served_digest(engine), engine.marker, engine.fills) == (old, 0, [])
    assert (fleet.transaction.report().state, fleet.transaction.report().version) == ("ready", Version(1, 0).packed)
    staged[place] ^= 4
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert served_digest(engine) == manifest.digest


def test_an_engine_that_fails_after_the_copy_gets_the_version_before_back() -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    old = served_digest(engine)
    engine.refuse = 1
    with pytest.raises(SyncError, match="replica-0 failed copying weights: ValueError: boom in the cache"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert (served_digest(engine), engine.marker) == (old, 0)
    assert fleet.transaction.report().state == "ready"


def covered(
    fleet: Fleet, engine: MarkerEngine, manifest: WeightManifest, verify: VerifyMode = "full"
) -> CoveredWeights:
    """A version as the transaction holds it."""
    plan = plan_coverage(manifest, engine.expected_tensors(), engine.expected_ties(), CoverageRules())
    return CoveredWeights(InProcessReceiver(fleet.exchange, holder="r", verify=verify).stage(manifest), plan)


def turned(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {**tensors, "weight": tensors["weight"].repeat_interleave(2)[::2]}


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    room = tensors["weight"].repeat(2)
    count = tensors["weight"].numel()
    return {**tensors, "weight": room[:count], "head": room[1 : count + 1]}


def wrongly_tied(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {**tensors, "marker": tensors["weight"][: tensors["marker"].numel()]}


def missing(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "head"}


def other_type(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {**tensors, "weight": tensors["weight"].double()}


@pytest.mark.parametrize("shown", [turned, overlapping, wrongly_tied, missing, other_type])
def test_memory_that_cannot_be_filled_tensor_by_tensor_is_left_to_the_engine(
    shown: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    weights = covered(fleet, engine, manifest)
    assert proved_fill(engine, weights) is not None
    engine.shown = shown
    assert proved_fill(engine, weights) is None


def test_tied_memory_is_filled_once() -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    engine.shown = lambda tensors: {**tensors, "head": tensors["weight"]}
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert engine.fills == [manifest.version]
    assert served_digest(engine) == manifest.digest


def test_where_nothing_was_verified_or_published_with_a_digest_nothing_is_proved_on_the_way() -> None:
    fleet, engine = make_fleet(), FilledEngine()
    manifest = staged_next(fleet, engine)
    assert proved_fill(engine, covered(fleet, engine, manifest, verify="off")) is None
    without = replace(manifest, tensors=tuple(replace(meta, digest="") for meta in manifest.tensors))
    assert proved_fill(engine, covered(fleet, engine, without)) is None
