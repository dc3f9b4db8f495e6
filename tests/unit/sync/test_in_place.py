"""A delta applied in place, in the pause: stopped anywhere it is taken back bit for bit, or the replica is fenced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import pytest
import torch

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.commands import StageCommand, SwapCommand
from paceline.core.errors import DigestMismatch, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.core.weight_ports import StagedChange, StagedWeights
from paceline.runtime.system import SystemClock
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.marker_model import MarkerEngine
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard
from paceline.testing.weight_memory import OwnedWeights
from tests.unit.weights.delta.cases import changed_copy, copies, same_bits

NAMES = ("a", "b", "c", "d", "e")
Tensors = dict[str, torch.Tensor]


class Boom(RuntimeError):
    """What an engine's library may throw."""


class Stopping(Mapping[str, torch.Tensor]):
    """Tensors of which the `stop_at`-th access raises; 0: none does."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stop_at: int) -> None:
        self._tensors = tensors
        self._left = stop_at

    def __getitem__(self, name: str) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise Boom(f"stopped at {name}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class StoppingChange:
    """A change whose `apply` stops at a tensor, and whose `take_back` may as well."""

    def __init__(self, change: StagedChange, receiver: StoppingReceiver) -> None:
        self._change = change
        self._receiver = receiver

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._receiver.applied += 1
        stop_at, self._receiver.stop_at = self._receiver.stop_at, 0
        self._change.apply(Stopping(tensors, stop_at))

    def take_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._receiver.taken_back += 1
        self._change.take_back(Stopping(tensors, self._receiver.stop_back_at))


class StoppingStaged:
    def __init__(self, staged: StagedWeights, change: StoppingChange) -> None:
        self._staged = staged
        self.change: StoppingChange | None = change

    def drop_change(self) -> None:
        self.change = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._staged, name)


class StoppingReceiver(InProcessReceiver):
    """Its next change stops at the `stop_at`-th changed tensor."""

    stop_at = 0
    stop_back_at = 0
    applied = 0
    taken_back = 0

    def stage(  # type: ignore[override]
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> StagedWeights:
        staged = super().stage(manifest, base, apply)
        if staged.change is None:
            return staged
        return StoppingStaged(staged, StoppingChange(staged.change, self))  # type: ignore[return-value]


class OwnEngine(MarkerEngine):
    """Owns five tensors; `tied` is a second memory of `a`. `patched` raises as often as `refuse_patches` says."""

    def __init__(self) -> None:
        self.memory = OwnedWeights()
        super().__init__(memory=self.memory)
        self._expected = dict.fromkeys((*NAMES, "tied"), ("bfloat16", (3000,)))
        self.refuse_patches = 0

    def patched(self, version: int) -> None:
        if self.refuse_patches:
            self.refuse_patches -= 1
            raise Boom("no patch")
        super().patched(version)


class Rig:
    """One replica's transaction over an engine that owns its memory; `sync(n)` changes 1 % and swaps version n in."""

    def __init__(self) -> None:
        exchange, clock = InProcessExchange(), SystemClock()
        self.clock = clock
        self.sender = InProcessSender(exchange, arenas=4, dtype=None, nonfinite="off", delta="delta")
        self.receiver = StoppingReceiver(exchange, holder="replica-0", verify="full")
        self.engine = OwnEngine()
        self.transaction = WeightTransaction(
            replica_id="replica-0", life=1, receiver=self.receiver, board=RecordingBoard(), clock=clock
        )
        draw = torch.Generator().manual_seed(0)
        self.trained: Tensors = {name: torch.randn(3000, generator=draw).bfloat16() for name in NAMES}
        self._served: int | None = None

    def publish(self, n: int) -> WeightManifest:
        version = Version(1, n).packed
        named = [*self.trained.items(), ("tied", self.trained["a"])]
        return publish(self.sender, named, version, base_version=self._served)

    def stage(self, manifest: WeightManifest) -> None:
        deadline = self.clock.wall() + 60
        self.transaction.stage(StageCommand(manifest=manifest, sync_id=1, deadline_wall=deadline), self.engine)

    def swap(self, manifest: WeightManifest) -> None:
        deadline = self.clock.wall() + 60
        command = SwapCommand(version=manifest.version, sync_id=1, deadline_wall=deadline)
        previous = self.transaction.swap(command, self.engine)
        self.transaction.audit(self.engine)
        self._served = manifest.version
        if previous is not None:
            previous.release()

    def change(self, share: float = 0.01) -> None:
        draw = np.random.default_rng(3)
        self.trained = {name: changed_copy(tensor, share, draw) for name, tensor in self.trained.items()}

    def sync(self, n: int) -> WeightManifest:
        manifest = self.publish(n)
        self.stage(manifest)
        self.swap(manifest)
        return manifest

    def serves(self, tensors: Tensors) -> bool:
        return same_bits(dict(self.engine.served_tensors()), {**tensors, "tied": tensors["a"]})

    def state(self) -> tuple[str, int | None]:
        report = self.transaction.report()
        return report.state, None if report.version is None else Version.unpack(report.version).n


def test_versions_are_applied_in_place_and_the_addresses_stay() -> None:
    rig = Rig()
    rig.sync(0)
    before = {name: tensor.data_ptr() for name, tensor in rig.engine.served_tensors().items()}
    for n in (1, 2, 3):
        rig.change()
        manifest = rig.sync(n)
        assert rig.serves(rig.trained)
        assert rig.state() == ("ready", n)
        assert rig.engine.version == manifest.version
    assert rig.receiver.applied == 3
    assert {name: tensor.data_ptr() for name, tensor in rig.engine.served_tensors().items()} == before
    assert before["tied"] != before["a"]


@pytest.mark.parametrize("stop_at", range(1, len(NAMES) + 1))
def test_stopped_at_any_tensor_the_version_before_is_restored_bit_by_bit(stop_at: int) -> None:
    rig = Rig()
    rig.sync(0)
    old, old_version = copies(rig.trained), rig.engine.version
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.receiver.stop_at = stop_at
    with pytest.raises(SyncError, match=f"failed changing in place weights: Boom: stopped at {NAMES[stop_at - 1]}"):
        rig.swap(manifest)
    assert rig.receiver.taken_back == 1
    assert rig.serves(old)
    assert rig.state() == ("ready", 0)
    assert rig.engine.version == old_version
    rig.swap(manifest)  # the next try succeeds without a restart
    assert rig.serves(rig.trained)
    assert rig.state() == ("ready", 1)


def test_an_engine_that_refuses_at_the_very_end_is_taken_back_too() -> None:
    rig = Rig()
    rig.sync(0)
    old = copies(rig.trained)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.engine.refuse_patches = 1
    with pytest.raises(SyncError, match="Boom: no patch"):
        rig.swap(manifest)
    assert rig.serves(old)
    assert rig.state() == ("ready", 0)


def test_what_cannot_be_subtracted_is_copied_back() -> None:
    rig = Rig()
    rig.sync(0)
    old = copies(rig.trained)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.receiver.stop_at, rig.receiver.stop_back_at = 4, 2
    with pytest.raises(SyncError, match="stopped at d"):
        rig.swap(manifest)
    assert rig.serves(old)
    assert rig.state() == ("ready", 0)


def test_where_nothing_can_be_proved_the_replica_is_fenced_and_comes_back_by_a_full_version() -> None:
    rig = Rig()
    rig.sync(0)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.receiver.stop_at, rig.receiver.stop_back_at = 3, 1
    rig.engine.memory.fail_at = "b"
    with pytest.raises(SyncError, match="stopped at c"):
        rig.swap(manifest)
    assert rig.state() == ("fenced", 0)
    rig.change()
    manifest = rig.publish(2)
    assert manifest.delta is not None
    rig.stage(manifest)
    rig.swap(manifest)
    assert rig.receiver.applied == 1  # not in place: the memory could hold anything
    assert rig.serves(rig.trained)
    assert rig.state() == ("ready", 2)


def test_a_wrong_byte_in_the_engine_is_found_before_the_version_is_confirmed() -> None:
    rig = Rig()
    rig.sync(0)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.engine.served_tensors()["c"].view(torch.uint8)[17] ^= 1
    with pytest.raises(DigestMismatch, match="does not serve the staged bytes of 1 tensors: c"):
        rig.swap(manifest)
    assert rig.state() == ("fenced", 0)
    rig.stage(manifest)  # the same version, in full
    rig.swap(manifest)
    assert rig.serves(rig.trained)
    assert rig.state() == ("ready", 1)


def test_between_swap_and_audit_nothing_is_reported_ready() -> None:
    rig = Rig()
    rig.sync(0)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    command = SwapCommand(version=manifest.version, sync_id=1, deadline_wall=rig.clock.wall() + 60)
    rig.transaction.swap(command, rig.engine)
    assert rig.transaction.report().state == "updating"
    rig.change()
    with pytest.raises(VersionError):  # the next command proves first, then refuses what is not newer
        rig.stage(manifest)
    assert rig.state() == ("ready", 1)


def test_an_engine_that_does_not_hold_the_base_is_copied_to() -> None:
    """A spare engine takes over while sequences of the one before end under their own version."""
    rig = Rig()
    rig.sync(0)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.engine = OwnEngine()
    rig.swap(manifest)
    assert rig.receiver.applied == 0
    assert rig.serves(rig.trained)
    assert rig.state() == ("ready", 1)


def test_a_change_that_is_proved_is_kept_no_longer() -> None:
    rig = Rig()
    rig.sync(0)
    rig.change()
    manifest = rig.publish(1)
    rig.stage(manifest)
    rig.swap(manifest)
    serving = rig.transaction.serving
    assert serving is not None
    assert (serving.manifest.version, serving.base_version) == (manifest.version, Version(1, 0).packed)
    assert serving.change is None
