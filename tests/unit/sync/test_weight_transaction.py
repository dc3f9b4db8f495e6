"""The replica's side of a sync: whole versions or none (V1, V6), late commands refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from paceline.core.errors import CoverageError, DigestMismatch, LateCommand, SyncError, VersionError
from paceline.core.version import Version
from paceline.testing.marker_model import MarkerEngine
from tests.leaping_clock import LeapingClock
from tests.unit.sync.fleet import Fleet, make_fleet


def swap_in(fleet: Fleet, engine: MarkerEngine, n: int) -> None:
    manifest = fleet.publish(n)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    previous = fleet.transaction.swap(fleet.swap_command(manifest), engine)
    if previous is not None:
        previous.release()


def test_a_version_is_served_only_after_its_swap() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    manifest = fleet.publish(0)
    assert fleet.transaction.report().state == "joining"
    report = fleet.transaction.stage(fleet.stage_command(manifest), engine)
    assert report.digest == manifest.digest
    assert fleet.transaction.report().version is None
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert fleet.transaction.report().state == "ready"
    assert fleet.transaction.report().version == manifest.version == engine.version
    fleet.transaction.announce(engine)
    assert fleet.board.published == [(manifest.version, manifest.digest)]


def test_staging_does_not_touch_what_is_served() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    swap_in(fleet, engine, 0)
    fleet.backend.update(None)  # type: ignore[arg-type]
    fleet.transaction.stage(fleet.stage_command(fleet.publish(1)), engine)
    assert engine.marker == 0
    assert fleet.transaction.report().version == Version(1, 0).packed


def test_versions_do_not_go_backwards() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    swap_in(fleet, engine, 0)
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    fleet.transaction.swap(fleet.swap_command(manifest), engine)
    with pytest.raises(VersionError, match="not newer"):
        fleet.transaction.stage(fleet.stage_command(manifest), engine)


class SlowEngine(MarkerEngine):
    """Is asked what it expects before a byte is fetched, and answers after the deadline."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = LeapingClock()

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        self.clock.leap(61.0)
        return super().expected_tensors()


def test_what_is_staged_after_the_deadline_is_given_back() -> None:
    engine = SlowEngine()
    fleet = make_fleet(arenas=2, clock=engine.clock)
    manifest = fleet.publish(0)
    command = fleet.stage_command(manifest, late_by=-60.0)
    with pytest.raises(LateCommand, match="after its deadline"):
        fleet.transaction.stage(command, engine)
    assert [arena.holders for arena in fleet.exchange.arenas.values()] == [[], []]
    with pytest.raises(SyncError, match="is not staged"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)


def test_late_and_foreign_commands_change_nothing() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    manifest = fleet.publish(0)
    with pytest.raises(LateCommand, match="after its deadline"):
        fleet.transaction.stage(fleet.stage_command(manifest, late_by=1.0), engine)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    with pytest.raises(LateCommand, match="after its deadline"):
        fleet.transaction.swap(fleet.swap_command(manifest, late_by=1.0), engine)
    foreign = make_fleet().publish(0, life=2)
    with pytest.raises(LateCommand, match="life 2"):
        fleet.transaction.stage(fleet.stage_command(foreign), engine)
    assert engine.version is None
    assert fleet.transaction.report().state == "joining"


def test_a_swap_of_what_is_not_staged_is_refused() -> None:
    fleet = make_fleet()
    with pytest.raises(SyncError, match="not staged"):
        fleet.transaction.swap(fleet.swap_command(fleet.publish(0)), MarkerEngine())


class RefusingEngine(MarkerEngine):
    """Refuses to bind from the second version on."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        if self.version is not None and version > self.version:
            raise CoverageError("boom in bind")
        super().bind(tensors, version)


class CopyingEngine(MarkerEngine):
    """Claims to serve the tensors but holds copies from the second version on."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        held = tensors if self.version is None else {name: tensor.clone() for name, tensor in tensors.items()}
        super().bind(held, version)


def test_a_refused_swap_leaves_the_old_version_whole() -> None:
    fleet, engine = make_fleet(), RefusingEngine()
    swap_in(fleet, engine, 0)
    fleet.backend.update(None)  # type: ignore[arg-type]
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    with pytest.raises(CoverageError, match="boom"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert (engine.marker, engine.version) == (0, Version(1, 0).packed)
    assert fleet.transaction.report().state == "ready"
    assert fleet.transaction.report().version == Version(1, 0).packed


def test_what_cannot_be_proved_is_fenced() -> None:
    fleet, engine = make_fleet(), CopyingEngine()
    swap_in(fleet, engine, 0)
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    with pytest.raises(DigestMismatch, match="does not serve the staged bytes"):
        fleet.transaction.swap(fleet.swap_command(manifest), engine)
    assert fleet.transaction.report().state == "fenced"


def test_bytes_changed_before_staging_are_noticed() -> None:
    fleet, engine = make_fleet(), MarkerEngine()
    manifest = fleet.publish(0)
    fleet.exchange.arenas[manifest.arena_id].buffer[3] ^= 1
    with pytest.raises(DigestMismatch):
        fleet.transaction.stage(fleet.stage_command(manifest), engine)


def test_leases_follow_stage_swap_discard_and_close() -> None:
    fleet, engine = make_fleet(arenas=2), MarkerEngine()
    swap_in(fleet, engine, 0)
    manifest = fleet.publish(1)
    fleet.transaction.stage(fleet.stage_command(manifest), engine)
    assert list(fleet.sender.blocking_holders()) == ["replica-0"]
    fleet.transaction.discard(manifest.version)
    fleet.transaction.discard(manifest.version)
    fleet.transaction.close()
    assert list(fleet.sender.blocking_holders()) == []
