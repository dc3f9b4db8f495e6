"""One engine, the weights that it serves, and the requests that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.ports import InferenceEngine
from paceline.core.weight_ports import StagedWeights


@dataclass(slots=True)
class Session:
    """Of a replica's engines each has one; a pinned one serves one version for a validation."""

    engine: InferenceEngine
    staged: StagedWeights | None
    pinned: bool
    requests: set[str] = field(default_factory=set)
    drain_until: float = float("inf")

    @property
    def has_work(self) -> bool:
        """Whether the engine has a sequence to go on with."""
        return self.engine.running + self.engine.waiting > 0
