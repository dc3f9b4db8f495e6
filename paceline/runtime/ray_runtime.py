"""RayRuntime: the parts of a run as Ray actors, on a Ray that is started for the run and stopped with it.

The only file that imports ray. One actor class hosts every part (`host_actor.HostShell`); a `RemotePart` makes its
methods awaitable, so a loop cannot tell a part in its own process from one across the cluster. A call to a part that
has died raises `WorkerDied` with its role.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from paceline.core.errors import PacelineError, WorkerDied
from paceline.runtime.host_actor import HostShell, Outcome, unwrap
from paceline.runtime.spec import RunSpec, encode_spec

OBJECT_STORE_BYTES = 128 * 1024 * 1024  # samples and commands only; weights have their own arenas
MAX_PENDING_CALLS = 1000
OTHER_ROLES = 4  # trainer, rollouter, message queue, synchronizer


class RemotePart:
    """A part in another process. Attribute access gives its coroutine methods; `replica_id` is its role."""

    def __init__(self, actor: Any, role: str) -> None:
        self._actor = actor
        self.replica_id = role

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                outcome: Outcome = await self._actor.call.remote(method, arguments, keywords)
            except RayActorError as error:
                raise WorkerDied(f"{self.replica_id} died while {method} was called", self.replica_id) from error
            except RayError as error:
                line = f"{self.replica_id}.{method} failed in Ray: {type(error).__name__}"
                raise PacelineError(line) from error
            return unwrap(outcome)

        return call


def _restore_signals() -> None:
    """Ray's SIGTERM handler would leave calls pending for ever; the default ends the process and with it the calls.

    Through libc, since actors run beside the main thread, where `signal.signal` is refused.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGTERM, int(signal.SIG_DFL))
    libc.signal(signal.SIGINT, int(signal.SIG_IGN))


class _HostActor:
    """The one actor class: a host, and its peers as `RemotePart`s."""

    def __init__(self, role: str, spec_bytes: bytes) -> None:
        _restore_signals()
        self._shell = HostShell(role, spec_bytes)

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Outcome:
        return await self._shell.call(method, arguments, keywords)

    async def connect(self, actors: Mapping[str, Any]) -> Outcome:
        peers = {role: RemotePart(actor, role) for role, actor in actors.items()}
        return await self._shell.call("connect", (peers,), {})


class RayRuntime:
    """Starts Ray, launches one actor per role, connects them, stops all."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._actors: dict[str, Any] = {}

    async def start(self) -> None:
        """Start Ray on this machine.

        Blocks the loop: Ray's calls hang when another thread than theirs has started it.
        """
        ray.init(
            address="local",
            num_cpus=len(self._spec.replica_ids) + OTHER_ROLES,  # so many workers are started ahead of the actors
            num_gpus=0,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(Path(self._spec.private_dir) / "ray"),
        )

    def launch(self, role: str) -> RemotePart:
        """Start the process of one role; returns at once."""
        actor_class = ray.remote(_HostActor)
        actor = actor_class.options(
            num_cpus=0, max_concurrency=MAX_PENDING_CALLS, max_restarts=0, max_task_retries=0
        ).remote(role, encode_spec(self._spec))
        self._actors[role] = actor
        return RemotePart(actor, role)

    async def connect(self) -> None:
        """Tell every part of all others."""
        outcomes = await asyncio.gather(*(actor.connect.remote(self._actors) for actor in self._actors.values()))
        for outcome in outcomes:
            unwrap(outcome)

    def kill(self, role: str) -> None:
        """End the process of a role at once; calls to it raise WorkerDied. Harmless when it is gone."""
        ray.kill(self._actors[role], no_restart=True)

    def stop(self, deadline_seconds: float) -> None:
        """Stop Ray; what does not stop in time is left to the process guard."""
        stopping = threading.Thread(target=ray.shutdown, daemon=True, name="stop-ray")
        stopping.start()
        stopping.join(deadline_seconds)
