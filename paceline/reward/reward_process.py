"""A process that runs one reward function and nothing else: `python -m paceline.reward.reward_process FD`.

Calls come and replies go over the socket FD; standard output and error are a log file, so that prints reach no display.
A `def` function runs in the main thread, one call at a time; an `async def` function has an event loop, and a thread
beside it ends the process when the loop has not turned for too long, naming the call that holds it. A copy of the
process that the function forked and let return ends at once: it would answer in the original's place.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from paceline.core.errors import ConfigError, RewardError
from paceline.core.sample import Score
from paceline.reward.compute_score import RewardFunction
from paceline.reward.function_spec import LENGTH_BYTES, Call, FunctionSpec, Ready, Refused, Reply, ToProcess, frame

TICK_SECONDS = 0.2


def main(descriptor: int) -> None:
    """Serve until the other end of the socket is closed."""
    with socket.socket(fileno=descriptor) as link:
        spec = _receive(link)
        assert isinstance(spec, FunctionSpec)
        try:
            function = RewardFunction(spec)
        except ConfigError as error:
            link.sendall(frame(Refused(error.message)))
            return
        link.sendall(frame(Ready(function.is_async)))
        if function.is_async:
            asyncio.run(_serve_async(link, function, spec.blocked_seconds))
        else:
            _serve(link, function)


def _serve(link: socket.socket, function: RewardFunction) -> None:
    original = os.getpid()
    while True:
        try:
            call = _receive(link)
        except EOFError:
            return
        if isinstance(call, Call):
            reply = _outcome(call, lambda call=call: function.call(call))  # type: ignore[misc]
            if os.getpid() != original:
                os._exit(0)
            link.sendall(frame(reply))


def _outcome(call: Call, score: Callable[[], Score]) -> Reply:
    try:
        found = score()
    except RewardError as error:
        return Reply(call.number, 0.0, {}, error.message, _children())
    return Reply(call.number, found.value, found.metrics, "", _children())


def _children() -> int:
    """Living children of this process and those that nobody has reaped."""
    count = 0
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            count += len(file.read_bytes().split())
    return count


async def _serve_async(link: socket.socket, function: RewardFunction, blocked_seconds: float) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    calls: dict[int, asyncio.Task[None]] = {}
    original = os.getpid()

    async def answer(call: Call) -> None:
        try:
            found = await function.call_async(call)
            reply = Reply(call.number, found.value, found.metrics, "", _children())
        except RewardError as error:
            reply = Reply(call.number, 0.0, {}, error.message, _children())
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


def _receive(link: socket.socket) -> ToProcess:
    length = int.from_bytes(_exactly(link, LENGTH_BYTES), "big")
    record: ToProcess = msgspec.msgpack.decode(_exactly(link, length), type=ToProcess)
    return record


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = link.recv(min(count - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
