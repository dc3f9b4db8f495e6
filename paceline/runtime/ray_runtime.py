"""RayRuntime: the parts of a run as Ray actors, on a Ray that is started for the run and stopped with it.

The only file that imports ray. One actor class hosts every part (`host_actor.HostShell`); a `RemotePart` makes its
methods awaitable, so a loop cannot tell a part in its own process from one across the cluster. A call to a part that
has died raises `WorkerDied` with its role and, in a cluster of several nodes, its node. `RayObjects` is the object
store under the checkpoint engine for replicas on other nodes.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._private.worker import global_worker
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OwnerDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.errors import CapacityError, ConfigError, DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.runtime.host_actor import HOSTS, HostShell, Outcome, unwrap
from paceline.runtime.model_files import weight_bytes
from paceline.runtime.placement import Node, place_replicas, store_bytes
from paceline.runtime.ray_environment import variables_of_workers
from paceline.runtime.spec import RunSpec, encode_spec
from paceline.runtime.stop_signal import StopRequested, StopSignal

TRAINER = "trainer"
MAX_PENDING_CALLS = 1000
OTHER_ROLES = 4  # trainer, rollouter, message queue, synchronizer


class RemotePart:
    """A part in another process. Attribute access gives its coroutine methods; `replica_id` is its role.

    `place` names its node in errors; empty in a cluster of one node.
    """

    def __init__(self, actor: Any, role: str, place: str = "") -> None:
        self._actor = actor
        self._name = f"{role} on {place}" if place else role
        self.replica_id = role

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                outcome: Outcome = await self._actor.call.remote(method, arguments, keywords)
            except (RayActorError, ActorUnschedulableError) as error:
                # Of a part that has not started nothing else tells why.
                why = f": {str(error).strip().splitlines()[-1].strip()[:300]}" if method == "start" else ""
                raise WorkerDied(f"{self._name} died while {method} was called{why}", self.replica_id) from error
            except RayError as error:
                line = f"{self._name}: {method} failed in Ray: {type(error).__name__}"
                raise PacelineError(line) from error
            return unwrap(outcome)

        return call


class RayObjects:
    """Implements `core.object_transport.ObjectTransport` over Ray's object store, in the process of an actor.

    References to objects cross only as Ray's own references in the replies of the actor that owns the objects
    (`lend`), so that Ray knows who uses one, also of a process that dies. `owner` is that actor, None in its own
    process; `origin` names it and its node in errors.
    """

    def __init__(self, owner: Any | None, origin: str) -> None:
        self._owner = owner
        self._origin = origin
        self._offered: dict[bytes, Any] = {}
        self._readers: dict[bytes, Counter[str]] = {}
        self._lock = threading.Lock()  # lending is asked for on the event loop, the rest in a thread

    @property
    def node(self) -> str:
        """See the port."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    # -- owner's side --------------------------------------------------------------------------------------------------

    def check_room(self, needed_bytes: int) -> None:
        """See the port."""
        node = next(node for node in living_nodes() if node.node_id == self.node)
        if needed_bytes > node.store_bytes:
            raise CapacityError(
                f"weights need {needed_bytes} bytes of object store on {node}, but it has {node.store_bytes} bytes"
            )

    def put(self, data: memoryview) -> bytes:
        """See the port."""
        try:
            made = ray.put(np.frombuffer(data, dtype=np.uint8))
        except RayError as error:
            line = f"the object store of {self._origin} takes no {data.nbytes} bytes: {type(error).__name__}"
            raise SyncError(line) from error
        reference: bytes = made.binary()
        with self._lock:
            self._offered[reference] = made
            self._readers[reference] = Counter()
        return reference

    def release(self, reference: bytes) -> None:
        """See the port."""
        with self._lock:
            self._offered.pop(reference, None)

    def holders(self, reference: bytes) -> Sequence[str]:
        """See the port."""
        # Ray's table of the objects that this process owns keeps each for as long as any process refers to it.
        worker: Any = global_worker
        used = reference.hex().encode() in worker.core_worker.get_all_reference_counts()
        with self._lock:
            if not used:
                self._readers.pop(reference, None)
                return []
            names = [name for name, count in self._readers[reference].items() if count > 0]
        return names or ["a reader that is leaving"]

    def lend(self, reference: bytes, holder: str) -> list[Any]:
        """Ray's reference to an object, as a list that is empty when it is not offered."""
        with self._lock:
            if reference not in self._offered:
                return []
            self._readers[reference][holder] += 1
            return [self._offered[reference]]

    def give_back(self, reference: bytes, holder: str) -> None:
        """This reader's name no longer stands for the object."""
        with self._lock:
            if reference in self._readers:
                self._readers[reference][holder] -= 1

    # -- reader's side -------------------------------------------------------------------------------------------------

    def get(self, reference: bytes, *, holder: str, deadline_seconds: float) -> memoryview:
        """See the port."""
        if self._owner is None:
            raise LookupError("this process owns the objects, it gets none")
        end = time.monotonic() + deadline_seconds
        try:
            lent = ray.get(self._owner.lend.remote(reference, holder), timeout=deadline_seconds)
            if not lent:
                raise LookupError(f"{self._origin} does not offer it any more")
            array = ray.get(lent[0], timeout=max(0.0, end - time.monotonic()))
        except RayError as error:
            self.done(reference, holder=holder)
            raise self._lost(error, holder, deadline_seconds) from error
        # The reference goes with the last view of the bytes, so that the owner knows for how long they are used.
        weakref.finalize(array, lent.clear).atexit = False
        data: memoryview = array.data
        return data

    def done(self, reference: bytes, *, holder: str) -> None:
        """See the port."""
        if self._owner is not None:
            self._owner.give_back.remote(reference, holder)

    def _lost(self, error: RayError, holder: str, deadline_seconds: float) -> PacelineError:
        if isinstance(error, GetTimeoutError):
            line = f"{holder} waited {deadline_seconds:g} s for weights from {self._origin}: they did not come"
            return DeadlineExceeded(line, self._origin, deadline_seconds)
        if isinstance(error, RayActorError | OwnerDiedError):
            return WorkerDied(f"{self._origin} died before {holder} had its weights", TRAINER)
        return SyncError(f"{holder} cannot get weights from {self._origin}: {type(error).__name__}")


def living_nodes() -> list[Node]:
    """The nodes of the cluster that this process belongs to."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        Node(str(node["NodeID"]), str(node["NodeName"]), int(node["Resources"].get("object_store_memory", 0)))
        for node in nodes
        if node["Alive"]
    ]


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
    """The one actor class: a host, and its peers as `RemotePart`s. `trainer` is the actor that owns the weights."""

    def __init__(
        self, role: str, spec_bytes: bytes, trainer: Any | None, trainer_name: str, hosts: Mapping[str, str]
    ) -> None:
        _restore_signals()
        self._objects = RayObjects(trainer, trainer_name)
        self._shell = HostShell(role, spec_bytes, self._objects, hosts)

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Outcome:
        return await self._shell.call(method, arguments, keywords)

    async def connect(self, actors: Mapping[str, Any], places: Mapping[str, str]) -> Outcome:
        peers = {role: RemotePart(actor, role, places[role]) for role, actor in actors.items()}
        return await self._shell.call("connect", (peers,), {})

    async def lend(self, reference: bytes, holder: str) -> list[Any]:
        return self._objects.lend(reference, holder)

    async def give_back(self, reference: bytes, holder: str) -> None:
        self._objects.give_back(reference, holder)


class RayRuntime:
    """Starts Ray, launches one actor per role, connects them, stops all.

    `address` is that of a running cluster to join, from one of its nodes; without it the run has a Ray of its own.
    `hosts` is the table of `host_actor`, or another with a class of one's own in it.
    """

    def __init__(
        self, spec: RunSpec, stop: StopSignal, *, address: str | None = None, hosts: Mapping[str, str] = HOSTS
    ) -> None:
        self._spec = spec
        self._stop = stop
        self._address = address
        self._hosts = dict(hosts)
        self._actors: dict[str, Any] = {}
        self._home: Node | None = None
        self._replica_nodes: dict[str, Node] = {}

    async def start(self) -> None:
        """Start Ray on this machine, or join the cluster, and place the replicas.

        Blocks the loop: Ray's calls hang when another thread than theirs has started it.

        Raises:
            RunInterrupted: a stop signal came meanwhile. PacelineError: Ray does not start.
            ConfigError, CapacityError: the cluster does not fit the run.
        """
        try:
            with self._stop.raising():
                self._init()
        except StopRequested as asked:
            raise asked.as_error() from None
        except SystemExit as left:  # while it starts, Ray answers SIGTERM so
            raise StopRequested(signal.SIGTERM).as_error() from left
        except Exception as error:  # errors of any class, from a full disk to a port; none is a fault of this program
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if self._address is not None:
                raise ConfigError(f"ray.address: cannot join the cluster at {self._address}: {line}") from error
            raise PacelineError(f"Ray did not start: {line}") from error
        self._place()

    def _init(self) -> None:
        if self._address is not None:
            variables = variables_of_workers(Path(self._spec.private_dir))
            ray.init(
                address=self._address,
                configure_logging=False,
                log_to_driver=False,
                runtime_env={"env_vars": variables},
            )
            return
        start_local_ray(
            processes=len(self._spec.replica_ids) + len(self._spec.validator_ids) + OTHER_ROLES,
            store_bytes=self._store_bytes(),
            private_dir=Path(self._spec.private_dir),
        )

    def _store_bytes(self) -> int:
        config = self._spec.config
        return store_bytes(config, weight_bytes(config, Path(self._spec.model_path)))

    def _place(self) -> None:
        nodes, own = living_nodes(), ray.get_runtime_context().get_node_id()
        self._replica_nodes = place_replicas(self._spec.config, self._spec.replica_ids, nodes, own, self._store_bytes())
        if len(nodes) > 1:
            self._home = next(node for node in nodes if node.node_id == own)

    def _node_of(self, role: str) -> Node | None:
        """None in a cluster of one node."""
        return None if self._home is None else self._replica_nodes.get(role, self._home)

    def _place_of(self, role: str) -> str:
        node = self._node_of(role)
        return "" if node is None else str(node)

    def launch(self, role: str) -> RemotePart:
        """Start the process of one role on its node; returns at once. The trainer comes before the replicas."""
        options: dict[str, Any] = {}
        place = self._place_of(role)
        if (node := self._node_of(role)) is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        trainer_place = self._place_of(TRAINER)
        trainer_name = f"{TRAINER} on {trainer_place}" if trainer_place else TRAINER
        actor_class = ray.remote(_HostActor)
        actor = actor_class.options(
            num_cpus=0, max_concurrency=MAX_PENDING_CALLS, max_restarts=0, max_task_retries=0, **options
        ).remote(role, encode_spec(self._spec), self._actors.get(TRAINER), trainer_name, self._hosts)
        self._actors[role] = actor
        return RemotePart(actor, role, place)

    async def connect(self) -> None:
        """Tell every part of all others."""
        places = {role: self._place_of(role) for role in self._actors}
        calls = [actor.connect.remote(self._actors, places) for actor in self._actors.values()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for role, outcome in zip(self._actors, outcomes, strict=True):
            if isinstance(outcome, RayActorError):
                raise WorkerDied(f"{role} died while it was connected", role) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            unwrap(outcome)

    def kill(self, role: str) -> None:
        """End the process of a role at once; calls to it raise WorkerDied. Harmless when it is gone."""
        ray.kill(self._actors[role], no_restart=True)

    def stop(self, deadline_seconds: float) -> None:
        """Stop Ray; what does not stop in time is left to the process guard."""
        stopping = threading.Thread(target=ray.shutdown, daemon=True, name="stop-ray")
        stopping.start()
        stopping.join(deadline_seconds)


def start_local_ray(*, processes: int, store_bytes: int, private_dir: Path) -> None:
    """Start a Ray of one node; so many workers are started ahead of the actors. Blocks."""
    ray.init(
        address="local",
        num_cpus=processes,
        num_gpus=0,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=store_bytes,
        _temp_dir=str(private_dir / "ray"),
    )


class PlainActors:
    """Ray's actors and object store as they are: for comparing other ways of moving weights with ours."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds

    def launch(self, kind: type, *arguments: Any) -> Any:
        """An actor of this class."""
        return ray.remote(num_cpus=0)(kind).remote(*arguments)

    def put(self, value: Any) -> Any:
        """A reference to the value in the object store."""
        return ray.put(value)

    def get(self, pending: Any) -> Any:
        """The values of references and of pending calls, within the deadline."""
        return ray.get(pending, timeout=self._deadline_seconds)

    def stop(self) -> None:
        """Stop Ray."""
        ray.shutdown()
