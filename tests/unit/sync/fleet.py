"""A trainer's sender and one replica's transaction over marker weights, in one process."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.commands import StageCommand, SwapCommand
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.runtime.system import SystemClock
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.marker_model import MarkerBackend
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard
from paceline.weights.coverage import CoverageRules


@dataclass
class Fleet:
    backend: MarkerBackend
    exchange: InProcessExchange
    sender: InProcessSender
    transaction: WeightTransaction
    board: RecordingBoard
    clock: SystemClock

    def publish(self, n: int, life: int = 1) -> WeightManifest:
        """Capture the trainer's tensors as version (life, n)."""
        return publish(self.sender, self.backend.named_tensors(), Version(life, n).packed)

    def stage_command(self, manifest: WeightManifest, late_by: float = -60.0) -> StageCommand:
        return StageCommand(manifest=manifest, sync_id=1, deadline_wall=self.clock.wall() - late_by)

    def swap_command(self, manifest: WeightManifest, late_by: float = -60.0) -> SwapCommand:
        return SwapCommand(version=manifest.version, sync_id=1, deadline_wall=self.clock.wall() - late_by)


def make_fleet(arenas: int = 3, rules: CoverageRules | None = None, clock: SystemClock | None = None) -> Fleet:
    exchange, board, clock = InProcessExchange(), RecordingBoard(), clock or SystemClock()
    return Fleet(
        backend=MarkerBackend(),
        exchange=exchange,
        sender=InProcessSender(exchange, arenas=arenas, dtype=None, nonfinite="error"),
        transaction=WeightTransaction(
            replica_id="replica-0",
            life=1,
            receiver=InProcessReceiver(exchange, holder="replica-0", verify="full"),
            board=board,
            clock=clock,
            rules=rules,
        ),
        board=board,
        clock=clock,
    )
