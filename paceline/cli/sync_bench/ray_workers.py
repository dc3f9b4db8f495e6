"""The benchmark's processes as actors of a Ray of its own, for the engine that moves weights through Ray's objects.

The actors run the same two classes as the processes, and are asked with the same messages. The Ray is started and
stopped with the session, in the benchmark's own process. `runtime.ray_environment.prepare_environment` comes before
the import of this module, and once: Ray reads it then.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import CALL_SECONDS, START_SECONDS, STOP_SECONDS
from paceline.cli.sync_bench.publisher_process import PublisherProcess
from paceline.cli.sync_bench.replica_process import ReplicaProcess
from paceline.core.errors import DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.runtime.ray_runtime import PlainActors, RayObjects, start_local_ray

R = TypeVar("R", bound=m.Reply)

# Two versions, the deltas of two, and what the allocator wastes.
_STORE_VERSIONS = 2.5
_STORE_BESIDE_BYTES = 256 << 20


class _Host:
    """The actor: the trainer, which owns the objects, or a replica, which is handed the trainer's actor."""

    def __init__(self, owner: Any | None) -> None:
        self._objects = RayObjects(owner, "trainer")
        made = PublisherProcess if owner is None else ReplicaProcess
        self._process: PublisherProcess | ReplicaProcess = made(self._objects)

    async def pid(self) -> int:
        return os.getpid()

    async def handle(self, frame: bytes) -> bytes:
        request: m.Request = msgspec.msgpack.decode(frame, type=m.Request)
        try:
            reply = await self._process.handle(request)
        except PacelineError as error:
            reply = m.Failed(error.message)
        return msgspec.msgpack.encode(reply)

    async def lend(self, reference: bytes, holder: str) -> list[Any]:
        return self._objects.lend(reference, holder)

    async def give_back(self, reference: bytes, holder: str) -> None:
        self._objects.give_back(reference, holder)


class RayWorker:
    """Implements `worker_ports.Worker`."""

    def __init__(self, name: str, actor: Any, pid: int) -> None:
        self.name = name
        self._actor = actor
        self._pid = pid

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    async def call(self, request: m.Request, reply: type[R], seconds: float = CALL_SECONDS) -> R:
        """Send a request and return its reply.

        Raises:
            SyncError: the actor says that it failed. WorkerDied: it has ended. DeadlineExceeded: no reply in time.
        """
        asked = type(request).__name__
        try:
            async with asyncio.timeout(seconds):
                received: bytes = await self._actor.handle.remote(msgspec.msgpack.encode(request))
        except TimeoutError as error:
            line = f"{self.name} did not answer {asked} within {seconds:g} s"
            raise DeadlineExceeded(line, self.name, seconds) from error
        except PacelineError:
            raise
        except Exception as error:  # Ray's own classes, which only the runtime may import
            line = f"{self.name} failed while it was asked to {asked}: {type(error).__name__}: {error}"
            raise WorkerDied(line.splitlines()[0], self.name) from error
        answer = msgspec.msgpack.decode(received, type=m.Reply)
        if isinstance(answer, m.Failed):
            raise SyncError(f"{self.name}: {answer.message}")
        if not isinstance(answer, reply):
            raise SyncError(f"{self.name} answered {asked} with {type(answer).__name__}")
        return answer

    async def stop(self) -> None:
        """Ask it to end; the cluster ends it in any case."""
        try:
            await self.call(m.Stop(), m.Done, STOP_SECONDS)
        except PacelineError:
            return


class RayWorkers:
    """A Ray with the trainer and so many replicas. States: started -> stopped."""

    def __init__(self, actors: PlainActors) -> None:
        self._actors = actors

    @classmethod
    def start_ray(cls, processes: int, model_bytes: int, directory: Path) -> Self:
        """Start the Ray; blocks."""
        store_bytes = int(_STORE_VERSIONS * model_bytes) + _STORE_BESIDE_BYTES
        start_local_ray(processes=processes, store_bytes=store_bytes, private_dir=directory)
        return cls(PlainActors(START_SECONDS))

    async def launch(self, setups: list[m.SetUp]) -> list[RayWorker]:
        """An actor for each, the trainer first, all set up."""
        trainer = self._actors.launch(_Host, None)
        actors = [trainer, *(self._actors.launch(_Host, trainer) for _ in setups[1:])]
        pids = await asyncio.to_thread(self._actors.get, [actor.pid.remote() for actor in actors])
        workers = [RayWorker(setup.name, actor, pid) for setup, actor, pid in zip(setups, actors, pids, strict=True)]
        await asyncio.gather(
            *(worker.call(setup, m.Done, START_SECONDS) for worker, setup in zip(workers, setups, strict=True))
        )
        return workers

    def stop(self) -> None:
        """Stop the Ray; blocks."""
        self._actors.stop()
