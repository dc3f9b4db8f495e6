"""A cluster of two nodes on this machine, and what is done on it; run as a process of its own, result as JSON.

    python -m tests.e2e.two_nodes SCENARIO DIRECTORY RESULT_FILE

Thin actors stand for trainer and replicas: they hold the two ends of the checkpoint engine over Ray's object store and
answer calls as hosts do. Nodes are told apart by Ray's ids alone. The counters are Ray's own: bytes created in a node's
store, and chunks that its object manager received from others.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint_engine.ray_object import RayObjectReceiver, RayObjectSender
from paceline.core.errors import PacelineError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import StagedWeights
from paceline.runtime.process_guard import ProcessGuard
from paceline.runtime.ray_environment import prepare_environment
from paceline.testing.publication import publish

STORE_BYTES = 80 << 20  # three versions of 24 MiB, and hardly more
DUMP_SECONDS = 0.5
DEADLINE_SECONDS = 60.0
ARENAS = 3


def weights(seed: int, mebibytes: int) -> dict[str, torch.Tensor]:
    """Made-up weights of several types, the same in every process."""
    numbers = torch.Generator().manual_seed(seed)
    half = torch.randn(mebibytes << 18, generator=numbers)
    return {
        "embed": half.view(-1, 1024),
        "layer": torch.randn(mebibytes << 18, generator=numbers).bfloat16(),
        "more": torch.randn(mebibytes << 18, generator=numbers).bfloat16(),
        "scale": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
        "head": half.view(-1, 1024),
    }


class Part:
    """What both ends share: calls come in and go out as those of hosts. `RemotePart` is its other end."""

    def __init__(self, end: Owner | Reader) -> None:
        self.end = end

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[bool, Any]:
        try:
            return True, await asyncio.to_thread(getattr(self.end, method), *arguments, **keywords)
        except PacelineError as error:
            return False, error

    async def lend(self, reference: bytes, holder: str) -> list[Any]:
        assert isinstance(self.end, Owner)
        return self.end.objects.lend(reference, holder)

    async def give_back(self, reference: bytes, holder: str) -> None:
        assert isinstance(self.end, Owner)
        self.end.objects.give_back(reference, holder)


class Owner:
    """The trainer's end."""

    def __init__(self, name: str, mebibytes: int) -> None:
        from paceline.runtime.ray_runtime import RayObjects

        self.mebibytes = mebibytes
        self.objects = RayObjects(None, name)
        self.sender = RayObjectSender(self.objects, arenas=ARENAS, dtype=None, nonfinite="error", threads=1)

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def capture(self, version: int, wait_seconds: float = DEADLINE_SECONDS) -> WeightManifest:
        """Publish as soon as there is room, as the trainer does."""
        deadline = time.monotonic() + wait_seconds
        while self.sender.blocking_holders() and time.monotonic() < deadline:
            time.sleep(0.02)
        return publish(self.sender, weights(version, self.mebibytes).items(), version)


class Reader:
    """A replica's end; holds the version that it staged last, and those that it is told to keep."""

    def __init__(self, name: str, owner: Any, origin: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        from paceline.runtime.ray_runtime import RayObjects

        objects = RayObjects(owner, origin)
        self.receiver = RayObjectReceiver(objects, holder=name, verify="full", deadline_seconds=deadline_seconds)
        self.staged: StagedWeights | None = None
        self.kept: list[StagedWeights] = []

    def stage(self, manifest: WeightManifest) -> str:
        """Stage beside the version before, then let that go; the digest."""
        staged = self.receiver.stage(manifest)
        if self.staged is not None:
            self.staged.release()
        self.staged = staged
        return staged.digest

    def keep(self) -> None:
        """Never release what is staged now."""
        assert self.staged is not None
        self.kept.append(self.staged)
        self.staged = None

    def matches(self, version: int, mebibytes: int) -> bool:
        """Whether the staged tensors are the made-up ones, bit by bit."""
        assert self.staged is not None
        named = weights(version, mebibytes)
        return all(torch.equal(self.staged.tensors[name], tensor) for name, tensor in named.items())

    def wait(self) -> None:
        """Answer too late for anybody."""
        time.sleep(10 * DEADLINE_SECONDS)


class TwoNodes:
    """The cluster as scenarios use it."""

    def __init__(self, cluster: Any, nodes: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.nodes = nodes

    def actor(self, node: str, kind: type[Owner | Reader], *arguments: Any) -> Any:
        """Start a part on a node; the actor."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        class PartActor(Part):
            def __init__(self) -> None:
                super().__init__(kind(*arguments))

        strategy = NodeAffinitySchedulingStrategy(self.nodes[node].node_id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 100, "max_restarts": 0, "max_task_retries": 0}
        return ray.remote(PartActor).options(scheduling_strategy=strategy, **options).remote()

    def place(self, node: str) -> str:
        """How errors name it."""
        return f"node {node} ({self.nodes[node].node_id[:12]})"

    def part(self, actor: Any, role: str, node: str) -> Any:
        """Its other end."""
        from paceline.runtime.ray_runtime import RemotePart

        return RemotePart(actor, role, self.place(node))

    def store(self, node: str) -> Any:
        """Ray's statistics of a node's object store."""
        from ray import nodes
        from ray._private import internal_api

        entries: list[dict[str, Any]] = nodes()  # type: ignore[no-untyped-call]
        node_stats: Any = internal_api.node_stats
        entry = next(entry for entry in entries if entry["NodeID"] == self.nodes[node].node_id)
        reply = node_stats(entry["NodeManagerAddress"], entry["NodeManagerPort"], include_memory_info=False)
        return reply.store_stats

    def chunks_received(self, node: str) -> int:
        """Chunks of objects that a node's object manager has received from other nodes, as its raylet tells."""
        # Both raylets of this machine write their state to the same file, in turn.
        file = Path(self.nodes[node].get_session_dir_path()) / "logs" / "debug_state.txt"
        first, deadline = time.time(), time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(DUMP_SECONDS / 10)
            if not file.is_file() or file.stat().st_mtime < first + DUMP_SECONDS:
                continue
            text = file.read_text(encoding="utf-8")
            found = re.search(r"num chunks received total: (\d+)", text)
            if found and f"Node ID: {self.nodes[node].node_id}" in text:
                return int(found[1])
        raise AssertionError("the raylet tells nothing")


@contextmanager
def two_nodes(directory: Path, store_bytes: int) -> Iterator[TwoNodes]:
    """Nodes "first", to which this process belongs, and "second"."""
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    options = {"num_gpus": 0, "object_store_memory": store_bytes, "temp_dir": str(directory / "ray")}
    nodes = {
        "first": cluster.add_node(num_cpus=3, node_name="first", include_dashboard=False, **options),
        "second": cluster.add_node(num_cpus=4, node_name="second", **options),
    }
    try:
        yield TwoNodes(cluster, nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()


async def transfer(nodes: TwoNodes) -> dict[str, Any]:
    """Four replicas on the second node and one on the first: what crosses, what is held, what is freed."""
    import ray

    mebibytes = 12
    owner = nodes.actor("first", Owner, "trainer", mebibytes)
    trainer = nodes.part(owner, "trainer", "first")
    where = {"replica-0": "first", **{f"replica-{index}": "second" for index in range(1, 5)}}
    actors = {name: nodes.actor(node, Reader, name, owner, "trainer") for name, node in where.items()}
    parts = {name: nodes.part(actor, name, where[name]) for name, actor in actors.items()}

    async def stage_all(manifest: WeightManifest) -> list[str]:
        return list(await asyncio.gather(*(part.stage(manifest) for part in parts.values())))

    manifest = await trainer.capture(1)
    created, chunks = nodes.store("second").cumulative_created_bytes, nodes.chunks_received("second")
    digests = await stage_all(manifest)
    result: dict[str, Any] = {
        "total_bytes": manifest.total_bytes,
        "published": manifest.digest,
        "digests": digests,
        "bytes_created_on_second": nodes.store("second").cumulative_created_bytes - created,
        "chunks_received_by_second": nodes.chunks_received("second") - chunks,
        "chunks_received_by_first": nodes.chunks_received("first"),
        "same_tensors": await asyncio.gather(*(part.matches(1, mebibytes) for part in parts.values())),
    }
    used: dict[str, list[int]] = {"first": [], "second": []}
    began = time.monotonic()
    for version in range(2, 52):
        manifest = await trainer.capture(version)
        assert set(await stage_all(manifest)) == {manifest.digest}
        for node, samples in used.items():
            samples.append(nodes.store(node).object_store_bytes_used)
    result["used"] = used
    result["spilled"] = [nodes.store(node).spilled_bytes_total for node in nodes.nodes]
    result["fallback"] = [nodes.store(node).object_store_bytes_fallback for node in nodes.nodes]
    result["sync_seconds"] = (time.monotonic() - began) / 50
    await parts["replica-3"].keep()
    result["blocked"] = await _message(_capture_and_stage(trainer, stage_all, 52, 56, parts["replica-3"]))
    ray.kill(actors["replica-3"])
    del parts["replica-3"]
    began = time.monotonic()
    manifest = await trainer.capture(60)
    result["after_death"] = [manifest.digest == digest for digest in await stage_all(manifest)]
    result["free_after_death_seconds"] = time.monotonic() - began
    return result


async def _capture_and_stage(
    trainer: Any, stage_all: Callable[[WeightManifest], Any], first: int, end: int, keeping: Any
) -> None:
    """Every version is kept by one replica: there has to be an end."""
    for version in range(first, end):
        await stage_all(await trainer.capture(version, 10.0))
        await keeping.keep()


async def death(nodes: TwoNodes) -> dict[str, Any]:
    """The second node dies with calls to it pending, and with an object on it that is wanted on the first."""
    owner = nodes.actor("first", Owner, "trainer", 4)
    far_owner = nodes.actor("second", Owner, "trainer", 4)
    trainer = nodes.part(owner, "trainer", "first")
    readers = {
        f"replica-{index}": nodes.part(
            nodes.actor("second", Reader, f"replica-{index}", owner, "trainer"), f"replica-{index}", "second"
        )
        for index in range(4)
    }
    near = nodes.part(nodes.actor("first", Reader, "replica-4", owner, "trainer"), "replica-4", "first")
    origin = f"trainer on {nodes.place('second')}"
    orphan = nodes.part(nodes.actor("first", Reader, "replica-5", far_owner, origin), "replica-5", "first")
    hasty = nodes.part(nodes.actor("first", Reader, "replica-6", far_owner, origin, 3.0), "replica-6", "first")
    far_trainer = nodes.part(far_owner, "trainer", "second")
    far_manifest = await far_trainer.capture(1)
    manifest = await trainer.capture(1)
    staged = await asyncio.gather(*(part.stage(manifest) for part in [*readers.values(), near]))
    os.kill(await far_trainer.pid(), signal.SIGSTOP)
    silent = await _message(hasty.stage(far_manifest))
    waiting = [asyncio.ensure_future(_message(part.wait())) for part in readers.values()]
    await asyncio.sleep(1)
    began = time.monotonic()
    await asyncio.to_thread(nodes.cluster.remove_node, nodes.nodes["second"], False)
    pending = await asyncio.gather(*waiting)
    pending_seconds = time.monotonic() - began
    following = await trainer.capture(2)
    return {
        "staged": [digest == manifest.digest for digest in staged],
        "place": nodes.place("second"),
        "silent_owner": silent,
        "pending": pending,
        "pending_seconds": pending_seconds,
        "later": [await _message(part.stage(following)) for part in readers.values()],
        "lost_owner": await _message(orphan.stage(far_manifest)),
        "lost_owner_seconds": time.monotonic() - began,
        "first_goes_on": await near.stage(following) == following.digest,
    }


async def _message(call: Any) -> str:
    """The error of a call, as class and line; it has to end within the deadline."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await call
    except PacelineError as error:
        return f"{type(error).__name__}: {error.message}"
    return "no error"


Scenario = Callable[[TwoNodes], dict[str, Any]]


def run(scenario: Scenario, directory: Path, result_file: Path, store_bytes: int = STORE_BYTES) -> None:
    """Start the cluster, run the scenario, write its result, leave nothing behind."""
    guard = ProcessGuard.start([directory])
    prepare_environment(directory)
    os.environ.update(
        {"RAY_debug_dump_period_milliseconds": f"{DUMP_SECONDS * 1000:.0f}", "RAY_TMPDIR": str(directory)}
    )
    (directory / "ray").mkdir()
    try:
        with two_nodes(directory, store_bytes) as nodes:
            result_file.write_text(json.dumps(scenario(nodes)), encoding="utf-8")
    finally:
        guard.finish(10.0)
    os._exit(0)  # Ray's own end of the process would look for the cluster that is gone


def joined(scenario: Callable[[TwoNodes], Coroutine[Any, Any, dict[str, Any]]]) -> Scenario:
    """A scenario that calls Ray itself, on the first node."""

    def started(nodes: TwoNodes) -> dict[str, Any]:
        import ray

        ray.init(address=nodes.cluster.address, configure_logging=False, log_to_driver=False)
        return asyncio.run(scenario(nodes))

    return started


if __name__ == "__main__":
    run(joined({"transfer": transfer, "death": death}[sys.argv[1]]), Path(sys.argv[2]), Path(sys.argv[3]))
