"""How a host's methods are called from another process, and how its errors come back as themselves.

An outcome is `(True, value)` or `(False, error)`: the error is one of `core.errors`, so it survives pickling and
keeps its class and its line. Anything else that a host raises is a fault of ours: its traceback goes to the run's
`faults.log`, its class and text to the caller.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, WorkerDied
from paceline.core.object_transport import ObjectTransport
from paceline.runtime.spec import RunSpec, decode_spec

Outcome = tuple[bool, Any]

HOSTS: Mapping[str, str] = {
    "message_queue": "paceline.runtime.hosts.queue_host:QueueHost",
    "synchronizer": "paceline.runtime.hosts.synchronizer_host:SynchronizerHost",
    "rollouter": "paceline.runtime.hosts.rollouter_host:RollouterHost",
    "trainer": "paceline.runtime.hosts.trainer_host:TrainerHost",
    "replica": "paceline.runtime.hosts.replica_host:ReplicaHost",
    "validator": "paceline.runtime.hosts.validator_host:ValidatorHost",
}
MOVES_WEIGHTS = ("trainer", "replica", "validator")


def kind_of(role: str) -> str:
    """`replica-3` is a `replica`; the other roles are their own kind."""
    return "replica" if role.startswith("replica-") else role


class HostShell:
    """One host in its process; what the runtime's actor class forwards to. Those who move weights get `objects`.

    `hosts` says which class (`module:name`) hosts which kind of role.
    """

    def __init__(self, role: str, spec_bytes: bytes, objects: ObjectTransport, hosts: Mapping[str, str]) -> None:
        self._role = role
        self._spec: RunSpec = decode_spec(spec_bytes)
        kind = kind_of(role)
        module, _, name = hosts[kind].partition(":")
        ports = (objects,) if kind in MOVES_WEIGHTS else ()
        self._host = getattr(import_module(module), name)(self._spec, role, *ports)

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Outcome:
        """Call one method of the host."""
        try:
            return True, await getattr(self._host, method)(*arguments, **keywords)
        except PacelineError as error:
            return False, error
        except Exception as error:  # whatever a part raises must reach the caller, who cannot see this process
            self._keep_traceback(method)
            line = f"{self._role} failed in {method}: {type(error).__name__}: {error}"
            return False, WorkerDied(line, self._role)

    def _keep_traceback(self, method: str) -> None:
        with (Path(self._spec.run_dir) / "faults.log").open("a", encoding="utf-8") as log:
            log.write(f"{self._role}.{method}\n{traceback.format_exc()}\n")


def unwrap(outcome: Outcome) -> Any:
    """The value, or the error raised here."""
    succeeded, value = outcome
    if succeeded:
        return value
    raise value
