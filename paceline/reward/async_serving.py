"""An `async def` reward function in its process: many calls under way on one event loop.

A thread beside the loop ends the process when the loop has not turned for too long, after a reply that names the call
that holds it; whoever asked makes the other calls again in another process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import NoReturn

import msgspec

from paceline.core.errors import RewardError
from paceline.reward.children import Children
from paceline.reward.compute_score import RewardFunction
from paceline.reward.function_spec import LENGTH_BYTES, Call, FunctionSpec, Reply, ToProcess, frame

TICK_SECONDS = 0.2


def serve(link: socket.socket, function: RewardFunction, blocked_seconds: float) -> None:
    """Serve until the other end of the socket is closed; ends the process."""
    asyncio.run(_serve(link, function, blocked_seconds))


async def _serve(link: socket.socket, function: RewardFunction, blocked_seconds: float) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    calls: dict[int, asyncio.Task[None]] = {}
    original = os.getpid()
    children = Children()

    async def answer(call: Call) -> None:
        try:
            found = await function.call_async(call)
            reply = Reply(call.number, found.value, found.metrics, "", children.left_behind())
        except RewardError as error:
            reply = Reply(call.number, 0.0, {}, error.message, children.left_behind())
        finally:
            calls.pop(call.number, None)
        if os.getpid() != original:
            os._exit(0)
        writer.write(frame(reply))

    watch = _LoopWatch(asyncio.get_running_loop(), os.dup(link.fileno()), blocked_seconds)
    watch.start()
    while True:
        try:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            record = msgspec.msgpack.decode(await reader.readexactly(length), type=ToProcess)
        except asyncio.IncompleteReadError:
            os._exit(0)  # nobody is left to answer; a function that swallows its cancellation must not keep us
        if isinstance(record, Call):
            calls[record.number] = asyncio.create_task(answer(record), name=str(record.number))
        elif not isinstance(record, FunctionSpec) and record.number in calls:
            calls.pop(record.number).cancel()


class _LoopWatch(threading.Thread):
    """Ends the process when its event loop stands still, after a reply that names the call that runs in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, seconds: float) -> None:
        super().__init__(name="loop watch", daemon=True)
        self._loop = loop
        self._descriptor = descriptor
        self._seconds = seconds
        self._turned = time.monotonic()

    def run(self) -> None:
        """Look for ever."""
        while True:
            self._loop.call_soon_threadsafe(self._turn)
            time.sleep(TICK_SECONDS)
            if time.monotonic() - self._turned > self._seconds:
                self._end()

    def _turn(self) -> None:
        self._turned = time.monotonic()

    def _end(self) -> NoReturn:
        task = asyncio.current_task(self._loop)
        if task is not None and task.get_name().isdigit():
            error = f"kept its event loop from turning for {self._seconds:g} s: await what takes long, or use def"
            os.write(self._descriptor, frame(Reply(int(task.get_name()), 0.0, {}, error)))
        os._exit(1)
