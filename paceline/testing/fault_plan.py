"""Which fault strikes where: a cell of the table (phase x fault), before or after the call took effect, at which call.

A *phase* is a point of a run at which a part waits for another, or an engine is called. A schedule's faults follow
from its seed alone: seed s strikes cell `s` modulo the number of cells, so that consecutive seeds fill the table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal[
    "capture",
    "publish",
    "stage",
    "fetch",
    "swap",
    "bind",
    "prove",
    "discard",
    "confirm",
    "queue_version",
    "rollout_version",
    "exchange",
    "put",
    "get",
    "pin",
    "unpin",
    "pause",
    "resume",
    "join",
    "share",
]
FaultKind = Literal["raise", "cancel", "hang", "delay", "kill"]
Moment = Literal["before", "after"]

PHASES: tuple[Phase, ...] = get_args(Phase)
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
CELLS = [(phase, fault, moment) for phase in PHASES for fault in FAULTS for moment in MOMENTS]

PHASE_OF_METHOD: dict[str, Phase] = {
    "capture_weights": "capture",
    "publish_weights": "publish",
    "stage": "stage",
    "swap": "swap",
    "discard_staged": "discard",
    "confirm_replicas": "confirm",
    "exchange": "exchange",
    "put_samples": "put",
    "get_samples": "get",
    "pin": "pin",
    "unpin": "unpin",
    "pause": "pause",
    "resume": "resume",
    "add_replica": "join",
    "generate": "share",
}
# How many calls of a phase a schedule makes at least; a fault strikes one of these.
_CALLS: dict[Phase, int] = {
    "exchange": 40,
    "put": 8,
    "get": 8,
    "discard": 1,
    "pause": 1,
    "resume": 1,
    "join": 1,
    "share": 3,
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """Strike the `call`-th call (from 1) of `phase`. `seconds` is the length of a delay.

    Example: `PlannedFault("swap", "hang", "after", call=3, seconds=0.0)`: the third swap is done, its reply is lost.
    """

    phase: Phase
    kind: FaultKind
    moment: Moment
    call: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.moment} {self.phase} #{self.call}"


def plan_faults(seed: int, *, deadline_seconds: float) -> list[PlannedFault]:
    """One or two faults; delays last up to three times `deadline_seconds`, so that some come too late."""
    rng = random.Random(f"faults-{seed}")
    phase, kind, moment = CELLS[seed % len(CELLS)]
    planned = [_place(rng, phase, kind, moment, deadline_seconds)]
    if phase == "discard":  # nothing is discarded in a sync that goes well
        planned.append(PlannedFault(rng.choice(("stage", "swap")), "raise", "before", rng.randint(3, 8)))
    elif phase == "join":  # nobody joins a run in which nobody died
        planned.append(PlannedFault("exchange", "kill", "before", rng.randint(5, 20)))
    elif rng.random() < 0.4:
        other = rng.choice([p for p in PHASES if p not in (phase, "put", "get", "discard", "join")])
        planned.append(_place(rng, other, rng.choice(FAULTS), rng.choice(MOMENTS), deadline_seconds))
    return planned


def _place(rng: random.Random, phase: Phase, kind: FaultKind, moment: Moment, deadline_seconds: float) -> PlannedFault:
    call = rng.randint(1, _CALLS.get(phase, 5))
    return PlannedFault(phase, kind, moment, call, rng.uniform(0.05, 3.0) * deadline_seconds)


def coverage_table(landed: Sequence[PlannedFault]) -> str:
    """How often each cell was struck, one line per phase."""
    counts = {(phase, kind): 0 for phase in PHASES for kind in FAULTS}
    for fault in landed:
        counts[fault.phase, fault.kind] += 1
    lines = [f"{'phase':<16}" + "".join(f"{kind:>8}" for kind in FAULTS)]
    lines += [f"{phase:<16}" + "".join(f"{counts[phase, kind]:>8}" for kind in FAULTS) for phase in PHASES]
    return "\n".join(lines)
