"""The store's door: a Unix socket over which a reader of the same user asks for an arena and gets its descriptor.

The socket lies in a directory that only its user can enter, and both ends check the other's user id. One message is
one packet, decoded against a schema and bounded in size; nothing is unpickled. A connection stands for one lease: it
carries the holder's name and stays open for as long as the lease lasts, so a name is gone when the lease or its
holder is.

The server is one thread that never waits for a client: who does not take its reply at once is dropped.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.core.errors import DeadlineExceeded, SyncError

MAX_MESSAGE_BYTES = 4096
_MAX_CONNECTIONS = 4096
_RETRY_SECONDS = 0.005
_SOCKET_NAME = "store"
_log = logging.getLogger(__name__)


class ArenaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for the arena that holds `version`; `holder` is the name under which the lease is known."""

    arena_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    version: int
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ArenaReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`error` is None when the descriptor comes along, else why it does not."""

    error: Annotated[str, msgspec.Meta(max_length=1024)] | None


Lookup = Callable[[ArenaRequest], int]


class ArenaServer:
    """Serves until `close`. `lookup` returns the descriptor to pass or raises SyncError; it must not block."""

    def __init__(self, directory: str, lookup: Lookup) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="store-", dir=directory))  # mode 0700
        self.address = str(self._home / _SOCKET_NAME)
        self._lookup = lookup
        self._grants: dict[socket.socket, ArenaRequest] = {}
        self._mutex = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _short_path(self.address) as path:
            self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="paceline-store", daemon=True)
        self._thread.start()

    def holders(self, arena_id: str) -> list[str]:
        """Names of the living connections that were granted this arena."""
        with self._mutex:
            return sorted({grant.holder for grant in self._grants.values() if grant.arena_id == arena_id})

    def close(self) -> None:
        """Stop serving and remove the socket. Leases go on; asking becomes an error."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _serve(self) -> None:
        connections: set[socket.socket] = set()
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                if ready is self._woken:
                    self._end(connections)
                    return
                if ready is self._listener:
                    self._accept(connections)
                elif isinstance(ready, socket.socket) and not self._answer(ready):
                    self._drop(ready, connections)

    def _accept(self, connections: set[socket.socket]) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # The client may be gone already, or this process may be out of descriptors for the moment.
            _log.warning("store.accept_failed: %s", error)
            return
        if len(connections) >= _MAX_CONNECTIONS or _peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> bool:
        """Serve one request; False when the connection has ended or does not keep to the protocol."""
        try:
            packet = connection.recv(MAX_MESSAGE_BYTES + 1)
            if not packet or len(packet) > MAX_MESSAGE_BYTES:
                return False
            request = msgspec.msgpack.decode(packet, type=ArenaRequest)
            fd = self._grant(connection, request)
            if isinstance(fd, str):
                connection.send(msgspec.msgpack.encode(ArenaReply(fd)))
            else:
                socket.send_fds(connection, [msgspec.msgpack.encode(ArenaReply(None))], [fd])
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("store.connection_dropped: %s", error)
            return False
        return True

    def _grant(self, connection: socket.socket, request: ArenaRequest) -> int | str:
        try:
            fd = self._lookup(request)
        except SyncError as error:
            return error.message[:1024]
        # Known by name before it can hold a lock.
        with self._mutex:
            self._grants[connection] = request
        return fd

    def _drop(self, connection: socket.socket, connections: set[socket.socket]) -> None:
        with self._mutex:
            self._grants.pop(connection, None)
        self._selector.unregister(connection)
        connections.discard(connection)
        connection.close()

    def _end(self, connections: set[socket.socket]) -> None:
        for connection in list(connections):
            self._drop(connection, connections)
        self._selector.close()
        self._listener.close()
        self._woken.close()


def request_arena(address: str, request: ArenaRequest, deadline_seconds: float) -> tuple[int, socket.socket]:
    """The arena's descriptor, and the connection to keep open for as long as the lease lasts.

    Raises:
        SyncError: no store listens there, it is another user's, or it refuses (the reason is in the message).
        DeadlineExceeded: the store does not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end = time.monotonic() + deadline_seconds
        _connect(connection, address, end)
        if _peer_uid(connection) != os.geteuid():
            raise SyncError(f"the weight store at {address} belongs to another user")
        connection.settimeout(max(0.001, end - time.monotonic()))
        connection.send(msgspec.msgpack.encode(request))
        return _receive_fd(connection), connection
    except TimeoutError as error:
        connection.close()
        message = f"the weight store at {address} did not answer within {deadline_seconds} s"
        raise DeadlineExceeded(message, "weight store", deadline_seconds) from error
    except OSError as error:
        connection.close()
        raise SyncError(f"the weight store at {address} is gone ({error.strerror})") from error
    except BaseException:  # nothing of a failed request stays open, whatever ended it
        connection.close()
        raise


def _receive_fd(connection: socket.socket) -> int:
    fds = array.array("i")
    # Not socket.recv_fds: Python 3.11 drops its flags, and the descriptor would be inherited by child processes.
    room = socket.CMSG_SPACE(fds.itemsize)
    packet, ancillary, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise SyncError("the weight store closed the connection")
        reply = msgspec.msgpack.decode(packet, type=ArenaReply)
        if reply.error is not None:
            raise SyncError(reply.error)
        if len(fds) != 1:
            raise SyncError("the weight store sent no descriptor")
    except msgspec.MsgspecError as error:
        _close_all(fds)
        raise SyncError(f"the weight store sent a reply that cannot be read: {error}") from error
    except SyncError:
        _close_all(fds)
        raise
    return fds[0]


def _connect(connection: socket.socket, address: str, end: float) -> None:
    while True:
        connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            with _short_path(address) as path:
                connection.connect(path)
        except BlockingIOError as error:
            # More clients at once than the listener queues.
            if time.monotonic() >= end:
                raise TimeoutError from error
            time.sleep(_RETRY_SECONDS)
        else:
            return


@contextlib.contextmanager
def _short_path(address: str) -> Iterator[str]:
    """The path by way of its open directory: a socket address holds 108 bytes, a run directory may be longer."""
    directory = os.open(Path(address).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(address).name}"
    finally:
        os.close(directory)


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
