"""The three ways in which the weights of a simulated run travel and are applied; which one follows from the seed.

mapped   every version whole, in arenas that replicas point at
built    a delta per version, over an object store; replicas build the version beside the one they serve
patched  a delta per version, which replicas apply in place to memory of their own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.checkpoint_engine.ray_object import RayObjectReceiver, RayObjectSender
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.testing.object_transport import InProcessObjects, ObjectCluster
from paceline.testing.weight_memory import OwnedWeights, PointedWeights, WeightMemory

Way = Literal["mapped", "built", "patched"]
# As often as each is drawn: most schedules are of the default.
WAYS: tuple[Way, ...] = ("mapped", "mapped", "built", "patched")


class SimulatedWeights:
    """One sender and its receivers."""

    def __init__(self, way: Way, arenas: int) -> None:
        self.way = way
        self._exchange = InProcessExchange()
        self._cluster = ObjectCluster()
        self.sender: WeightSender
        if way == "built":
            home = InProcessObjects(self._cluster, "home")
            # A killed process lets go of what it holds a moment later than of its leases.
            self.sender = RayObjectSender(
                home, arenas=arenas + 8, dtype=None, nonfinite="error", threads=1, delta="delta"
            )
        else:
            delta: Literal["full", "delta"] = "full" if way == "mapped" else "delta"
            self.sender = InProcessSender(self._exchange, arenas=arenas, dtype=None, nonfinite="error", delta=delta)

    def receiver(self, holder: str) -> WeightReceiver:
        """A replica's end."""
        if self.way == "built":
            away = InProcessObjects(self._cluster, "away")
            return RayObjectReceiver(away, holder=holder, verify="full", deadline_seconds=60.0)
        return InProcessReceiver(self._exchange, holder=holder, verify="full")

    @property
    def width(self) -> int:
        """Elements of the marker model's weight: enough that a delta is smaller than the whole."""
        return 8 if self.way == "mapped" else 2048

    @property
    def memory(self) -> Callable[[], WeightMemory]:
        """Makes where an engine keeps its weights."""
        return OwnedWeights if self.way == "patched" else PointedWeights
