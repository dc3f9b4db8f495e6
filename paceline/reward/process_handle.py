"""ProcessHandle: the rollouter's end of one reward process, from its start to the end of its process group.

Law: when the process ends, by itself or by `kill`, whatever its function has started in its group ends with it, and
every call that waits for a reply learns it. States: starting -> ready -> ended -> reaped; the event loop never waits
for a process that is on its way out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError, RewardError
from paceline.reward.function_spec import LENGTH_BYTES, Call, Cancel, FromProcess, FunctionSpec, Ready, Refused, Reply
from paceline.reward.function_spec import frame as frame_of

LAST_WORDS_SECONDS = 1.0
REAPED_SECONDS = 10.0  # what is killed is gone sooner, unless the system itself hangs
START_SECONDS = 120.0  # what a reward function imports is its own affair
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class ProcessEnded(RewardError):
    """The process ended before it replied; `args[0]` says how."""


class ProcessHandle:
    """A started process; made by `start_process`. `reaped` is done once nothing of it is left."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._pidfd = os.pidfd_open(process.pid)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self.reaped: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._on_death)

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return not self._ended.done()

    async def open(self, spec: FunctionSpec) -> bool:
        """Hand the spec over and wait until the function is loaded; returns whether it is `async def`.

        Raises:
            ConfigError: the function cannot be used.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._writer.write(frame_of(spec))
        try:
            async with asyncio.timeout(START_SECONDS):
                first = await self._read(self._reader)
        except TimeoutError as error:
            raise ConfigError(f"{spec.path or spec.module}: is not loaded after {START_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            await asyncio.wait({self._ended}, timeout=LAST_WORDS_SECONDS)
            how = self._ended.result() if self._ended.done() else "closed its connection"
            raise ConfigError(f"{spec.path or spec.module}: its process {how} while it was loaded") from error
        if isinstance(first, Refused):
            raise ConfigError(first.error)
        self._reading = asyncio.create_task(self._deliver(self._reader))
        return isinstance(first, Ready) and first.is_async

    async def ask(self, call: Call) -> Reply:
        """The reply to a call. Cancelled, it tells an `async def` function that nobody waits any more.

        Raises:
            ProcessEnded: there will be none.
        """
        if self._ended.done() or self._writer is None:
            raise ProcessEnded("its process has ended")
        waiting: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[call.number] = waiting
        self._writer.write(frame_of(call))
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._ended.done():
                self._writer.write(frame_of(Cancel(call.number)))
            raise
        finally:
            self._waiting.pop(call.number, None)

    def kill(self) -> None:
        """End the process and its group at once. Twice is harmless."""
        if not self._ended.done():
            self._kill_group()
            self._conclude("was ended", 0.0)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            # Dead or not, it is not reaped yet, so the number of its group cannot be another's.
            os.killpg(self._process.pid, signal.SIGKILL)

    def _on_death(self) -> None:
        """It is dead, of whatever: reap it, and end what it leaves."""
        self._kill_group()
        code = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.reaped.set_result(None)
        if not self._ended.done():
            self._conclude(f"ended with {code}" if code >= 0 else f"was ended by signal {-code}", LAST_WORDS_SECONDS)

    def _conclude(self, how: str, last_words_seconds: float) -> None:
        self._ended.set_result(how)
        if self._reading is None:
            self._close(None)
        else:
            # Ends by itself with what the process has sent, unless a child that left the group holds the socket.
            self._loop.call_later(last_words_seconds, self._reading.cancel)
            self._reading.add_done_callback(self._close)

    def _close(self, _: asyncio.Task[None] | None) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._link.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProcessEnded(f"its process {self._ended.result()}"))

    async def _deliver(self, reader: asyncio.StreamReader) -> None:
        with suppress(EOFError, OSError, msgspec.DecodeError):
            while True:
                reply = await self._read(reader)
                if isinstance(reply, Reply):
                    waiting = self._waiting.get(reply.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)

    async def _read(self, reader: asyncio.StreamReader) -> FromProcess:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        record: FromProcess = msgspec.msgpack.decode(await reader.readexactly(length), type=FromProcess)
        return record


async def start_process(spec: FunctionSpec, log: Path) -> tuple[ProcessHandle, bool]:
    """A process that has loaded the function, and whether that is `async def`. What it prints is added to `log`.

    Raises:
        ConfigError: the function cannot be used.
    """
    handle = _spawn(log)
    try:
        return handle, await handle.open(spec)
    except BaseException:  # whatever it was, cancellation too: nothing is left behind
        handle.kill()
        await all_reaped([handle])
        raise


async def all_reaped(handles: Collection[ProcessHandle]) -> None:
    """Return once nothing is left of these processes, which are dead or killed."""
    if handles:
        await asyncio.wait([handle.reaped for handle in handles], timeout=REAPED_SECONDS)


def _spawn(log: Path) -> ProcessHandle:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    path = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.reward.reward_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # One thread unless the environment says otherwise: the cores are the replicas' and the trainer's.
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ProcessHandle(process, ours)
