"""C08: whatever a receiver does while it stages, the sync ends in time with its name, and the next one succeeds.

Every checkpoint engine; then the digest turn of shared memory, which one receiver holds for all of its node.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from paceline.checkpoint_engine import shared_memory as engine
from paceline.checkpoint_engine.verification import claim_of
from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import WeightReceiver, WeightSender
from paceline.store.arena_reader import ArenaReader
from paceline.testing.publication import publish
from tests.contract.checkpoint_engine_links import LINKS, Link, RayObjectLink, SharedMemoryLink
from tests.contract.failing_receivers import TIMEOUT_SECONDS, Blocks, Boom, SyncRig, end_of_staging, stage_threads

NAMES = ("replica-0", "replica-1")


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = LINKS[request.param]()
    yield made
    made.close()


@pytest.fixture
def shared_memory() -> Iterator[SharedMemoryLink]:
    made = SharedMemoryLink()
    yield made
    made.close()


def rig_of(link: Link, *names: str) -> tuple[SyncRig, WeightSender]:
    # An object is given up only once the next one is there, so a version that failed takes a place of its own.
    sender = link.sender(arenas=2 + len(names) - 1 + isinstance(link, RayObjectLink))
    return SyncRig(sender, {name: link.receiver(name) for name in names}), sender


def finish(rig: SyncRig, sender: WeightSender) -> None:
    """Nothing of a sync is left: no thread that stages, no lease."""
    end_of_staging()  # one that has told its outcome may have its last step before it
    rig.close()
    gc.collect()
    assert stage_threads() == []
    assert list(sender.blocking_holders()) == []


# ---- every engine ---------------------------------------------------------------------------------------------------


def test_c08_the_receivers_own_words_reach_the_caller_and_the_next_sync_succeeds(link: Link) -> None:
    rig, sender = rig_of(link, "replica-0")

    async def scenario() -> None:
        await rig.sync(1)
        rig.replicas["replica-0"].receiver.arm(2, Boom())
        with pytest.raises(SyncError, match=r"replica-0 failed staging weights: ValueError: boom in bucket 2"):
            await rig.sync(2)
        assert rig.markers() == {"replica-0": 1}
        assert (await rig.sync(3)).fenced == {}
        assert rig.markers() == {"replica-0": 3}

    rig.run(scenario())
    finish(rig, sender)


def test_c08_a_receiver_that_blocks_is_named_in_time_and_takes_part_again_when_it_is_free(link: Link) -> None:
    rig, sender = rig_of(link, *NAMES)
    blocks = Blocks()

    async def scenario() -> None:
        await rig.sync(1)
        rig.replicas["replica-1"].receiver.arm(2, blocks)
        update = await rig.sync_past_the_deadline(2, "replica-1", blocks.begun)
        assert list(update.swapped) == ["replica-0"]
        assert "replica-1" in update.fenced["replica-1"]
        assert rig.markers() == {"replica-0": 2, "replica-1": 1}
        blocks.let_go.set()
        assert await asyncio.to_thread(blocks.ended.wait, 60)
        await asyncio.to_thread(end_of_staging)  # what was staged too late is given back by itself
        await rig.catch_up("replica-1")
        assert rig.markers() == {"replica-0": 2, "replica-1": 2}
        for n in (3, 4, 5):
            assert (await rig.sync(n)).fenced == {}

    rig.run(scenario())
    finish(rig, sender)


def test_c08_alone_a_receiver_that_blocks_ends_the_sync_with_its_name(link: Link) -> None:
    rig, sender = rig_of(link, "replica-0")
    blocks = Blocks()

    async def scenario() -> None:
        await rig.sync(1)
        rig.replicas["replica-0"].receiver.arm(2, blocks)
        with pytest.raises(SyncError, match=r"reached no replica: .*replica-0"):
            await rig.sync_past_the_deadline(2, "replica-0", blocks.begun)
        blocks.let_go.set()
        await asyncio.to_thread(end_of_staging)  # what was staged too late is given back by itself
        assert (await rig.sync(3)).fenced == {}
        assert rig.markers() == {"replica-0": 3}

    rig.run(scenario())
    finish(rig, sender)


# ---- the digest turn of shared memory -------------------------------------------------------------------------------


class TakesTheTurn:
    """Leases the version, is told to hash it, and then hangs, or closes its socket."""

    def __init__(self, *, then_closes: bool) -> None:
        self.has_it = threading.Event()
        self.let_go = threading.Event()
        self._then_closes = then_closes

    def __call__(self, manifest: WeightManifest, receiver: WeightReceiver) -> None:
        lease, connection = ArenaReader().lease(
            address=manifest.address,
            arena_id=manifest.arena_id,
            version=manifest.version,
            total_bytes=manifest.total_bytes,
            holder="replica-1",
            deadline_seconds=TIMEOUT_SECONDS,
        )
        assert connection.ask_digest("full", claim_of(manifest), TIMEOUT_SECONDS) == ("", "")
        self.has_it.set()
        if not self._then_closes:
            assert self.let_go.wait(60)
        connection.close()
        lease.release()
        raise SyncError("replica-1 closed its connection in the middle")


class WaitsForTheTurn:
    """Lets the other one have the turn first."""

    def __init__(self, other: TakesTheTurn) -> None:
        self._other = other

    def __call__(self, manifest: WeightManifest, receiver: WeightReceiver) -> None:
        assert self._other.has_it.wait(60)


@pytest.mark.parametrize("then_closes", [False, True], ids=["hangs", "closes its socket"])
def test_c08_who_has_the_digest_turn_and_fails_takes_no_other_replica_along(
    shared_memory: SharedMemoryLink, then_closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE", 0.5 / TIMEOUT_SECONDS)  # for the one that has the turn
    sender = shared_memory.sender(arenas=3)
    receivers = {name: shared_memory.receiver(name, deadline_seconds=TIMEOUT_SECONDS) for name in NAMES}
    rig = SyncRig(sender, receivers)
    turn = TakesTheTurn(then_closes=then_closes)

    async def scenario() -> None:
        await rig.sync(1)
        rig.replicas["replica-1"].receiver.arm(2, turn)
        rig.replicas["replica-0"].receiver.arm(2, WaitsForTheTurn(turn))
        update = await (rig.sync(2) if then_closes else rig.sync_past_the_deadline(2, "replica-1", turn.has_it))
        assert list(update.swapped) == ["replica-0"]
        assert update.verified
        assert "replica-1" in update.fenced["replica-1"]
        turn.let_go.set()
        await asyncio.to_thread(end_of_staging)  # what was staged too late is given back by itself
        await rig.catch_up("replica-1")
        assert rig.markers() == {"replica-0": 2, "replica-1": 2}
        assert (await rig.sync(3)).fenced == {}

    rig.run(scenario())
    finish(rig, sender)


HOLDS_THE_TURN = """
import sys, time, msgspec
from paceline.checkpoint_engine import shared_memory as engine
from paceline.checkpoint_engine.verification import claim_of
from paceline.core.manifest import WeightManifest
from paceline.store.arena_reader import ArenaReader
from paceline.testing.publication import publish
manifest = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WeightManifest)
lease, connection = ArenaReader().lease(
    address=manifest.address, arena_id=manifest.arena_id, version=manifest.version,
    total_bytes=manifest.total_bytes, holder="dying", deadline_seconds=60,
)
print(connection.ask_digest("full", claim_of(manifest), 60), flush=True)
time.sleep(600)
"""


def test_c08_one_that_is_killed_with_the_digest_turn_is_replaced_by_who_waits(
    shared_memory: SharedMemoryLink,
) -> None:
    sender = shared_memory.sender()
    manifest = publish(sender, [("w", torch.rand(100_000))], 1)
    dying = subprocess.Popen([sys.executable, "-c", HOLDS_THE_TURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert dying.stdin is not None
        assert dying.stdout is not None
        dying.stdin.write(msgspec.msgpack.encode(manifest))
        dying.stdin.close()
        dying.stdin = None
        assert dying.stdout.readline() == b"('', '')\n"
        threading.Timer(0.1, dying.send_signal, [signal.SIGKILL]).start()
        staged = shared_memory.receiver("replica-1").stage(manifest)  # waits for the one that dies
    finally:
        dying.send_signal(signal.SIGKILL)
        dying.communicate(timeout=30)
    assert staged.digest == manifest.digest
    staged.release()
    publish(sender, [("w", torch.rand(100_000))], 2)
    assert list(sender.blocking_holders()) == []
