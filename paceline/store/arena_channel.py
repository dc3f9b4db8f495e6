"""The reader's end of the store's door (`arena_server`): ask for an arena, and who has hashed it.

The connection stays open for as long as the lease lasts. Every wait has a deadline and names who was waited for.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.store.arena_backing import ArenaKind
from paceline.store.channel_messages import (
    MAX_MESSAGE_BYTES,
    ArenaReply,
    ArenaRequest,
    DigestQuestion,
    DigestReply,
    DigestReport,
    DigestScope,
    Reply,
)

_RETRY_SECONDS = 0.005


class LeaseConnection:
    """The open connection of one lease; what can be asked over it."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self._connection = connection
        self._address = address

    def ask_digest(self, scope: DigestScope, claim: str, deadline_seconds: float) -> tuple[str, str]:
        """`(digest, by)` that another reader with the same claim has taken of the leased bytes, or ("", "") to take it
        oneself.

        Raises:
            DeadlineExceeded: the reader that is taking it, or the store, does not come to an end.
            SyncError: the store is gone.
        """
        culprit = "weight store"
        end = time.monotonic() + deadline_seconds
        try:
            self._connection.send(msgspec.msgpack.encode(DigestQuestion(scope, claim)))
            while True:
                self._connection.settimeout(max(0.001, end - time.monotonic()))
                reply = self._receive()
                if reply.verdict == "compute":
                    return "", ""
                if reply.verdict == "known":
                    return reply.digest, reply.by
                culprit = reply.by
        except TimeoutError as error:
            message = f"{culprit} did not verify the leased weights within {deadline_seconds} s"
            raise DeadlineExceeded(message, culprit, deadline_seconds) from error
        except OSError as error:
            raise SyncError(f"the weight store at {self._address} is gone ({error.strerror})") from error

    def report_digest(self, digest: str) -> None:
        """Tell the store what was taken of the leased bytes; a store that is gone needs no report."""
        with contextlib.suppress(OSError):
            self._connection.send(msgspec.msgpack.encode(DigestReport(digest)))

    def close(self) -> None:
        """The lease has ended."""
        self._connection.close()

    def _receive(self) -> DigestReply:
        packet = self._connection.recv(MAX_MESSAGE_BYTES)
        if not packet:
            raise SyncError(f"the weight store at {self._address} closed the connection")
        reply = _decode(packet)
        if not isinstance(reply, DigestReply):
            raise SyncError("the weight store sent a reply to another question")
        return reply


def request_arena(
    address: str, request: ArenaRequest, deadline_seconds: float
) -> tuple[int, ArenaKind, LeaseConnection]:
    """The arena's descriptor and kind, and the connection to keep open for as long as the lease lasts.

    Raises:
        SyncError: no store listens there, it is another user's, or it refuses (the reason is in the message).
        DeadlineExceeded: the store does not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end = time.monotonic() + deadline_seconds
        _connect(connection, address, end)
        if peer_uid(connection) != os.geteuid():
            raise SyncError(f"the weight store at {address} belongs to another user")
        connection.settimeout(max(0.001, end - time.monotonic()))
        connection.send(msgspec.msgpack.encode(request))
        fd, kind = _receive_fd(connection)
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
    return fd, kind, LeaseConnection(connection, address)


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """The path by way of its open directory: a socket address holds 108 bytes, a run directory may be longer."""
    directory = os.open(Path(address).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(address).name}"
    finally:
        os.close(directory)


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _receive_fd(connection: socket.socket) -> tuple[int, ArenaKind]:
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
        reply = _decode(packet)
        if not isinstance(reply, ArenaReply):
            raise SyncError("the weight store sent a reply to another question")
        if reply.error is not None:
            raise SyncError(reply.error)
        if len(fds) != 1:
            raise SyncError("the weight store sent no descriptor")
    except SyncError:
        _close_all(fds)
        raise
    return fds[0], reply.kind


def _decode(packet: bytes) -> Reply:
    try:
        reply: Reply = msgspec.msgpack.decode(packet, type=Reply)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SyncError(f"the weight store sent a reply that cannot be read: {error}") from error
    return reply


def _connect(connection: socket.socket, address: str, end: float) -> None:
    while True:
        connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            with short_path(address) as path:
                connection.connect(path)
        except BlockingIOError as error:
            # More clients at once than the listener queues.
            if time.monotonic() >= end:
                raise TimeoutError from error
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
