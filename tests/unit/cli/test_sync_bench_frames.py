"""A process of the benchmark that fails, dies or hangs is an error with its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import WorkerProcess
from paceline.core.errors import DeadlineExceeded, SyncError, WorkerDied

MODULE = "paceline.cli.sync_bench.peers.peer_process"


def setup(directory: Path, peer: str = "safetensors_shm") -> m.SetUp:
    return m.SetUp(name="replica-0", gib=0.03, directory=str(directory), threads=1, peer=peer, rank=1, replicas=1)


def test_failure_death_and_silence_name_the_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = await WorkerProcess.start(MODULE, setup(tmp_path), tmp_path)
        try:
            with pytest.raises(SyncError, match=r"replica-0 holds .* of another version than 7"):
                await worker.call(m.PeerCheck(7), m.Done)
            with pytest.raises(SyncError, match=r"replica-0: .*weights-7\.safetensors"):
                await worker.call(m.PeerSync(7), m.Seconds)
            with pytest.raises(SyncError, match="a peer is not asked for Memcpy"):
                await worker.call(m.Memcpy(), m.CopyRate)
            with pytest.raises(DeadlineExceeded, match="replica-0 did not answer PeerCheck") as late:
                await worker.call(m.PeerCheck(7), m.Done, seconds=0.0)
            assert late.value.culprit == "replica-0"
            # Its process was ended: a reply that comes late must not be taken for that to the next request.
            with pytest.raises(WorkerDied, match="replica-0 was ended") as died:
                await worker.call(m.PeerCheck(7), m.Done)
            assert died.value.worker == "replica-0"
        finally:
            await worker.stop()
        assert not Path(f"/proc/{worker.pid}").exists()

    asyncio.run(scenario())


def test_a_process_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"replica-0 ended while it was asked to SetUp \(KeyError: 'pigeon'\)"):
        asyncio.run(WorkerProcess.start(MODULE, setup(tmp_path, peer="pigeon"), tmp_path))
