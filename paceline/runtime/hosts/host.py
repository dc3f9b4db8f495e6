"""The life of a process of a run, the same for every host: `start`, `connect`, `run`, `stop`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.core.events import ProcessStarted
from paceline.observability.event_log import EventLog
from paceline.runtime.collector import settle_collector
from paceline.runtime.run_lock import hold_as_process
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import SystemClock


class Host(Protocol):
    """What the runtime does with a host, in this order."""

    async def start(self) -> None:
        """Import and build; may take seconds."""
        ...

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """Learn the other parts, by role."""
        ...

    async def run(self) -> None:
        """The part's loop; returns when it is done or stopped."""
        ...

    async def stop(self) -> None:
        """End `run` and release everything."""
        ...


class HostProcess:
    """Clock, event log and start record of one process; hosts hold one (they do not inherit it)."""

    def __init__(self, spec: RunSpec, role: str) -> None:
        self.began = time.monotonic()
        self.spec = spec
        self.role = role
        self.clock = SystemClock()
        self.lock = hold_as_process(Path(spec.run_dir))  # until the process ends: nobody else may go on with the run
        self.events = EventLog(spec.events_path, role, self.clock.wall)

    @property
    def threads(self) -> int:
        """Compute threads of this process."""
        return self.spec.threads.get(self.role, 0)

    def started(self) -> None:
        """Record that the process is ready."""
        settle_collector()
        self.events.emit(
            ProcessStarted(role=self.role, pid=os.getpid(), threads=self.threads, seconds=time.monotonic() - self.began)
        )
