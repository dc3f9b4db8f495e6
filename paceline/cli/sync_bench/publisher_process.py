"""The trainer's process: weights of its own, the real sender, and the plain copies that it is compared with.

Run as `python -m paceline.cli.sync_bench.publisher_process`; its first request tells it who it is. Between two
captures every tensor changes, as after an optimiser step.
"""

from __future__ import annotations

import asyncio
import time

import torch

from paceline.checkpoint_engine.shared_memory import SharedMemorySender
from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.frames import CALL_SECONDS, RequestPipe
from paceline.cli.sync_bench.model_shapes import ModelShapes, shapes_of
from paceline.cli.sync_bench.plain_copies import CopyProbe, split_capture
from paceline.cli.sync_bench.weights import make_weights, mark, named_tensors
from paceline.core.commands import CaptureCommand, CaptureReport
from paceline.core.errors import DeadlineExceeded, SyncError

ARENAS = 2
_POLL_SECONDS = 0.001


class PublisherProcess:
    """The trainer and the requests to it. States: made -> set up -> stopped."""

    def __init__(self) -> None:
        self._shapes: ModelShapes | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._sender: SharedMemorySender | None = None
        self._probe: CopyProbe | None = None
        self._threads = 1

    async def handle(self, request: m.Request) -> m.Reply:
        """Answer one request."""
        match request:
            case m.SetUp():
                self._set_up(request)
            case m.Capture(command):
                return m.Captured(await self._capture(command))
            case m.Memcpy():
                assert self._probe is not None
                return self._probe.measure()
            case m.SplitCapture():
                return split_capture(self._weights, self._threads)
            case m.Stop():
                if self._sender is not None:
                    self._sender.close()
            case _:
                raise SyncError(f"the trainer is not asked for {type(request).__name__}")
        return m.Done()

    def _set_up(self, setup: m.SetUp) -> None:
        torch.set_num_threads(1)  # the sender has threads of its own
        self._threads = setup.threads
        self._shapes = shapes_of(setup.gib)
        self._weights = make_weights(self._shapes, seed=0)
        self._probe = CopyProbe(self._shapes.nbytes)
        self._sender = SharedMemorySender(
            directory=setup.directory, arenas=ARENAS, dtype=None, nonfinite="error", threads=setup.threads
        )
        mark(self._weights, 0)

    async def _capture(self, command: CaptureCommand) -> CaptureReport:
        sender = self._sender
        if sender is None:
            raise SyncError("the trainer is not set up yet")
        began = time.monotonic()
        end = began + CALL_SECONDS
        while holders := sender.blocking_holders():
            if time.monotonic() >= end:
                line = f"no free arena within {CALL_SECONDS} s: held by {', '.join(holders)}"
                raise DeadlineExceeded(line, holders[0], CALL_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)
        free_at = time.monotonic()
        manifest = await asyncio.to_thread(sender.capture, named_tensors(self._weights), command.version)
        captured = time.monotonic()
        report = CaptureReport(manifest=manifest, seconds=captured - free_at, wait_seconds=free_at - began)
        asyncio.get_running_loop().call_later(0.0, mark, self._weights, command.version + 1)
        return report


async def run() -> None:
    """Serve requests until told to stop."""
    await RequestPipe().serve(PublisherProcess().handle)


if __name__ == "__main__":
    asyncio.run(run())
