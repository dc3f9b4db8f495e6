"""One process of a peer: the trainer (rank 0) or a replica, made by the peer's own file.

Run as `python -m paceline.cli.sync_bench.peers.peer_process`; its first request tells it who it is.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Protocol

import torch

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import RequestPipe
from paceline.cli.sync_bench.model_shapes import shapes_of
from paceline.cli.sync_bench.peers.peer_table import PEERS
from paceline.core.errors import PacelineError, SyncError


class PeerSide(Protocol):
    """One side of a peer; it blocks, since its process does nothing else."""

    def sync(self, version: int) -> float:
        """Do this side's part of moving `version`; seconds for which its sequence got no token, 0 if it has none."""
        ...

    def check(self, version: int) -> None:
        """Raises SyncError unless all tensors here are of `version`."""
        ...

    def close(self) -> None: ...


class PeerProcess:
    """The requests to one side. States: made -> set up -> stopped."""

    def __init__(self) -> None:
        self._side: PeerSide | None = None

    async def handle(self, request: m.Request) -> m.Reply:
        """Answer one request."""
        match request:
            case m.SetUp():
                torch.set_num_threads(1)
                self._side = import_module(PEERS[request.peer].module).build(request, shapes_of(request.gib))
            case m.PeerSync(version) if self._side is not None:
                try:
                    return m.Seconds(self._side.sync(version))
                except PacelineError:
                    raise
                except Exception as error:  # whatever the peer's library raises is one line to the benchmark
                    raise SyncError(f"{type(error).__name__}: {error}") from error
            case m.PeerCheck(version) if self._side is not None:
                self._side.check(version)
            case m.Stop():
                if self._side is not None:
                    self._side.close()
            case _:
                raise SyncError(f"a peer is not asked for {type(request).__name__} now")
        return m.Done()


if __name__ == "__main__":
    asyncio.run(RequestPipe().serve(PeerProcess().handle))
