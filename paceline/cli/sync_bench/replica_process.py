"""The process of one replica: the real `Replica`, `WeightTransaction`, receiver and serving table, a small engine.

Run as `python -m paceline.cli.sync_bench.replica_process`, or in an actor of a Ray cluster (`ray_workers`); its first
request tells it who it is.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.decode_engine import PACE_SECONDS, DecodeEngine
from paceline.cli.sync_bench.engine_ends import make_receiver
from paceline.cli.sync_bench.frames import CALL_SECONDS, RequestPipe
from paceline.cli.sync_bench.model_shapes import HEAD, shapes_of
from paceline.cli.sync_bench.worker_ports import NoEvents
from paceline.core.commands import ExchangeRequest
from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.object_transport import ObjectTransport
from paceline.core.sample import GenerationRequest, SamplingParams
from paceline.rollout.replica import Replica
from paceline.runtime.system import SystemClock, ThreadWork
from paceline.store.serving_table import FileServingBoard
from paceline.sync.weight_transaction import WeightTransaction
from paceline.weights.digest import dense_bytes, digest_each
from paceline.weights.leaf_runs import fill_leaves

T = TypeVar("T")

_ENDLESS = 1 << 40
_HASHES = 3


class ReplicaProcess:
    """One replica and the requests to it. States: made -> set up -> stopped."""

    def __init__(self, objects: ObjectTransport | None = None) -> None:
        self._objects = objects
        self._name = "replica"
        self._engine: DecodeEngine | None = None
        self._transaction: WeightTransaction | None = None
        self._replica: Replica | None = None
        self._loop: asyncio.Task[None] | None = None

    async def handle(self, request: m.Request) -> m.Reply:
        """Answer one request."""
        match request:
            case m.SetUp():
                self._set_up(request)
            case m.Stage(command):
                return m.Staged(await self._while_decoding(self._made().stage(command)))
            case m.Swap(command):
                # It runs before the swap's first step, which then waits already when the decode step has ended.
                asyncio.get_running_loop().call_soon(self._end_rest)
                return m.Swapped(await self._while_decoding(self._made().swap(command)))
            case m.Discard(version):
                await self._made().discard_staged(version)
            case m.Generate():
                await self._generate()
            case m.Pause():
                await self._while_decoding(self._made().pause())
            case m.Resume():
                await self._resume()
            case m.LastPause():
                return await self._last_pause()
            case m.TakeDigest(threads):
                return m.Seconds(await asyncio.to_thread(self._hash, threads))
            case m.TakeProof():
                return m.Seconds(await asyncio.to_thread(self._proof))
            case m.Stop():
                await self._stop()
            case _:
                raise SyncError(f"a replica is not asked for {type(request).__name__}")
        return m.Done()

    def _set_up(self, setup: m.SetUp) -> None:
        torch.set_num_threads(1)
        engine = DecodeEngine(shapes_of(setup.gib), setup.apply)
        clock = SystemClock()
        transaction = WeightTransaction(
            replica_id=setup.name,
            life=m.LIFE,
            receiver=make_receiver(setup, self._objects),
            board=FileServingBoard(directory=setup.directory, replica_id=setup.name),
            clock=clock,
        )
        self._name, self._engine, self._transaction = setup.name, engine, transaction
        self._replica = Replica(
            replica_id=setup.name,
            make_engine=lambda: engine,
            transaction=transaction,
            partial_rollout=True,
            drain_seconds=60.0,
            decode_work=ThreadWork("decode"),
            stage_work=ThreadWork("stage"),
            clock=clock,
            events=NoEvents(),
        )
        self._loop = asyncio.create_task(self._replica.run())

    async def _generate(self) -> None:
        params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=_ENDLESS, stop_token_ids=())
        request = GenerationRequest(f"{self._name}-0", [0], params)
        await self._made().exchange(ExchangeRequest(requests=[request], acknowledged=0, wait_seconds=0.0))

    async def _resume(self) -> None:
        assert self._engine is not None
        self._engine.forget_gap()
        await self._made().resume()
        await asyncio.sleep(8 * PACE_SECONDS)  # a few steps, to be in the middle of generation again

    def _end_rest(self) -> None:
        if self._engine is not None:
            self._engine.end_rest()

    async def _last_pause(self) -> m.PauseRecord:
        assert self._engine is not None
        end = time.monotonic() + CALL_SECONDS / 2
        while (record := self._engine.last_pause) is None:
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"{self._name} made no step after a swap", self._name, CALL_SECONDS / 2)
            await asyncio.sleep(PACE_SECONDS / 2)
        return record

    def _hash(self, threads: int) -> float:
        assert self._engine is not None
        served = {name: tensor for name, tensor in self._engine.served_tensors().items() if name != HEAD}
        seconds: list[float] = []
        for _ in range(_HASHES):
            began = time.perf_counter()
            digest_each(served, threads)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _proof(self) -> float:
        assert self._engine is not None
        assert self._transaction is not None
        assert self._transaction.serving is not None
        own = {name: tensor for name, tensor in self._engine.served_tensors().items() if name != HEAD}
        pairs = [(self._transaction.serving.tensors[name], memory) for name, memory in own.items()]
        pieces = [(dense_bytes(source), dense_bytes(memory)) for source, memory in pairs]
        proved: list[float] = []
        plain: list[float] = []
        for _ in range(_HASHES):  # over equal bytes: the engine may go on reading
            began = time.perf_counter()
            fill_leaves(pieces)
            between = time.perf_counter()
            for source, memory in pairs:
                memory.copy_(source)
            proved.append(between - began)
            plain.append(time.perf_counter() - between)
        return max(0.0, statistics.median(proved) - statistics.median(plain))

    async def _stop(self) -> None:
        if self._replica is not None and self._loop is not None:
            await self._replica.close()
            await self._loop

    async def _while_decoding(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """Await what only the decode loop can complete; its end is an error at once."""
        assert self._loop is not None
        task = asyncio.ensure_future(awaitable)
        await asyncio.wait({task, self._loop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._loop.result()
            raise SyncError(f"the decode loop of {self._name} has ended")
        return await task

    def _made(self) -> Replica:
        if self._replica is None:
            raise SyncError("the replica is not set up yet")
        return self._replica


async def run() -> None:
    """Serve requests; the decode loop's error ends the process."""
    process = ReplicaProcess()
    await RequestPipe().serve(process.handle)


if __name__ == "__main__":
    asyncio.run(run())
