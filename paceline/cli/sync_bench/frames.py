"""Frames over pipes: the benchmark's hold on a process, and the process's loop of requests.

A frame is its length (4 bytes, little-endian) and msgpack. Every wait for a process has a deadline; a process that does
not answer, or ends, is an error with its name and the last line it has written. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from paceline.cli.sync_bench.messages import Done, Failed, Reply, Request, SetUp, Stop
from paceline.core.errors import DeadlineExceeded, PacelineError, SyncError, WorkerDied

R = TypeVar("R", bound=Reply)

MAX_FRAME_BYTES = 1 << 26
START_SECONDS = 180.0  # imports, on a busy machine, and the making of the weights
CALL_SECONDS = 120.0
STOP_SECONDS = 20.0
_LENGTH = struct.Struct("<I")


class WorkerProcess:
    """One process of the benchmark, `name` in errors. One request at a time."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._given_up = False

    @classmethod
    async def start(cls, module: str, setup: SetUp, logs: Path) -> Self:
        """Run `python -m module`, tell it who it is and wait until it is ready; what it writes goes below `logs`.

        Raises:
            WorkerDied, DeadlineExceeded, SyncError: it does not come up.
        """
        log = logs / f"{setup.peer or setup.apply}-{setup.name}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        worker = cls(setup.name, process, log)
        try:
            await worker.call(setup, Done, START_SECONDS)
        except BaseException:  # a process that never was of use is not left behind, whatever ended its start
            worker.kill()
            await process.wait()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def call(self, request: Request, reply: type[R], seconds: float = CALL_SECONDS) -> R:
        """Send a request and return its reply. A process whose reply was not waited for is ended: what it says later
        would be taken for the reply to the next request.

        Raises:
            SyncError: the process says that it failed. WorkerDied: it has ended. DeadlineExceeded: no reply in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = type(request).__name__
        if self._given_up:
            raise WorkerDied(f"{self.name} was ended before it was asked to {asked}{self._last_line()}", self.name)
        try:
            async with asyncio.timeout(seconds):
                self._process.stdin.write(_frame(request))
                await self._process.stdin.drain()
                received = await _read(self._process.stdout)
        except asyncio.CancelledError:
            self.kill()
            raise
        except TimeoutError as error:
            self.kill()
            message = f"{self.name} did not answer {asked} within {seconds:g} s{self._last_line()}"
            raise DeadlineExceeded(message, self.name, seconds) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerDied(
                f"{self.name} ended while it was asked to {asked}{self._last_line()}", self.name
            ) from error
        answer = msgspec.msgpack.decode(received, type=Reply)
        if isinstance(answer, Failed):
            raise SyncError(f"{self.name}: {answer.message}")
        if not isinstance(answer, reply):
            raise SyncError(f"{self.name} answered {asked} with {type(answer).__name__}")
        return answer

    async def stop(self) -> None:
        """Ask it to end, and end it where it does not."""
        with suppress(PacelineError):
            await self.call(Stop(), Done, STOP_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """End it now; harmless when it has ended."""
        self._given_up = True
        # Not Process.kill: it would take the exit status that asyncio's own watcher waits for.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:300]})" if said else ""


class RequestPipe:
    """The process's end: requests from standard input, replies to what was standard output.

    What anything in the process prints goes to standard error from here on.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)

    async def serve(self, handle: Callable[[Request], Awaitable[Reply]]) -> None:
        """Answer until `Stop`, or until the other end is gone."""
        reader = asyncio.StreamReader(limit=MAX_FRAME_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while True:
            try:
                request: Request = msgspec.msgpack.decode(await _read(reader), type=Request)
            except asyncio.IncompleteReadError:
                return
            try:
                reply = await handle(request)
            except PacelineError as error:
                reply = Failed(error.message)
            self._write(_frame(reply))
            if isinstance(request, Stop):
                return

    def _write(self, frame: bytes) -> None:
        while frame:
            frame = frame[os.write(self._out, frame) :]


def _frame(message: Request | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise SyncError(f"a frame of {length} bytes was announced, at most {MAX_FRAME_BYTES} are taken")
    return await reader.readexactly(length)
