"""A process that runs one reward function and nothing else: `python -m paceline.reward.reward_process FD`.

Calls come and replies go over the socket FD; standard output and error are a log file, so that prints reach no display.
A `def` function runs in the main thread, one call at a time; an `async def` one has an event loop (`async_serving`).
A copy of the process that the function forked and let return ends at once: it would answer in the original's place.
"""

from __future__ import annotations

import os
import socket
import sys
from io import TextIOWrapper
from typing import cast

import msgspec

from paceline.core.errors import ConfigError, RewardError
from paceline.reward.children import Children
from paceline.reward.compute_score import RewardFunction
from paceline.reward.function_spec import LENGTH_BYTES, Call, FunctionSpec, Ready, Refused, Reply, ToProcess, frame


def main(descriptor: int) -> None:
    """Serve until the other end of the socket is closed."""
    for stream in (sys.stdout, sys.stderr):
        # A line is one write, before the process is ended: processes share the file. PYTHONUNBUFFERED makes it two.
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True, write_through=False)
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
            from paceline.reward.async_serving import serve  # asyncio is half of the start of a process

            serve(link, function, spec.blocked_seconds)
        else:
            _serve(link, function)


def _serve(link: socket.socket, function: RewardFunction) -> None:
    original = os.getpid()
    children = Children()
    while True:
        try:
            call = _receive(link)
        except EOFError:
            return
        if isinstance(call, Call):
            reply = _reply_to(call, function, children)
            if os.getpid() != original:
                os._exit(0)
            link.sendall(frame(reply))


def _reply_to(call: Call, function: RewardFunction, children: Children) -> Reply:
    try:
        found = function.call(call)
    except RewardError as error:
        return Reply(call.number, 0.0, {}, error.message, children.left_behind())
    return Reply(call.number, found.value, found.metrics, "", children.left_behind())


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
