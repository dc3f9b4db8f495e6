"""Simulated runs under the production supervisor."""

from __future__ import annotations

from paceline.core.waits import Waits
from paceline.runtime.supervision import Supervisor
from paceline.testing.simulation import OTHER_ROLES, Simulation


async def supervise(simulation: Simulation) -> None:
    """Start, connect, restart dead replicas, run to the end of the trainer."""
    await Supervisor(
        runtime=simulation,
        replica_roles=simulation.replica_roles,
        other_roles=OTHER_ROLES,
        spare_roles=simulation.spare_roles,
        max_restarts=simulation.config.rollout.max_replica_restarts,
        waits=Waits(who="driver", clock=simulation.clock, events=simulation.checker),
        on_started=lambda: None,
    ).run()
