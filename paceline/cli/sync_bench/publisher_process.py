"""The trainer's process: weights of its own, the real sender, and the plain copies that it is compared with.

Run as `python -m paceline.cli.sync_bench.publisher_process`, or in an actor of a Ray cluster (`ray_workers`); its first
request tells it who it is.
"""

from __future__ import annotations

import asyncio
import time

import torch

from paceline.cli.sync_bench import messages as m
from paceline.cli.sync_bench.engine_ends import make_sender
from paceline.cli.sync_bench.frames import CALL_SECONDS, RequestPipe
from paceline.cli.sync_bench.model_shapes import ModelShapes, shapes_of
from paceline.cli.sync_bench.plain_copies import CopyProbe, split_capture
from paceline.cli.sync_bench.weights import make_weights, named_tensors, train
from paceline.core.commands import CaptureCommand, CaptureReport, PublishReport
from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.object_transport import ObjectTransport
from paceline.core.weight_ports import WeightSender

# Of the elements, how many other bits a training step leaves where deltas are measured: a step of Adam at a small rate
# changes 0.3 to 0.5 % of bfloat16 weights.
CHANGED_SHARE = 0.005
_POLL_SECONDS = 0.001


class PublisherProcess:
    """The trainer and the requests to it. States: made -> set up -> stopped."""

    def __init__(self, objects: ObjectTransport | None = None) -> None:
        self._objects = objects
        self._shapes: ModelShapes | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._sender: WeightSender | None = None
        self._changed_share = 0.0
        self._probe: CopyProbe | None = None
        self._threads = 1

    async def handle(self, request: m.Request) -> m.Reply:
        """Answer one request."""
        match request:
            case m.SetUp():
                self._set_up(request)
            case m.Train(version):
                train(self._weights, version, self._changed_share)
            case m.Capture(command):
                return m.Captured(await self._capture(command))
            case m.Publish():
                return m.Publication(await self._publish())
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
        self._sender = make_sender(setup, self._objects)
        self._changed_share = CHANGED_SHARE if setup.mode == "delta" else 0.0

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
        captured = await asyncio.to_thread(
            sender.capture, named_tensors(self._weights), command.version, command.base_version
        )
        return CaptureReport(
            version=captured.version,
            digest=captured.digest,
            bytes=captured.total_bytes,
            seconds=time.monotonic() - free_at,
            wait_seconds=free_at - began,
        )

    async def _publish(self) -> PublishReport:
        if self._sender is None:
            raise SyncError("the trainer is not set up yet")
        began = time.monotonic()
        published = await asyncio.to_thread(self._sender.publish)
        return PublishReport(published=published, seconds=time.monotonic() - began)


async def run() -> None:
    """Serve requests until told to stop."""
    await RequestPipe().serve(PublisherProcess().handle)


if __name__ == "__main__":
    asyncio.run(run())
