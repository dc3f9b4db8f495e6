"""The store's door: a Unix socket over which a reader of the same user asks for an arena and gets its descriptor.

The socket lies in a directory that only its user can enter, and both ends check the other's user id. Messages are those
of `channel_messages`; nothing is unpickled. A connection stands for one lease: it carries the holder's name and stays
open for as long as the lease lasts, so a name is gone when the lease or its holder is.

The server is one thread that never waits for a client: who does not take its reply at once is dropped.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.core.errors import SyncError
from paceline.store.arena_backing import ArenaKind
from paceline.store.arena_channel import peer_uid, short_path
from paceline.store.channel_messages import (
    MAX_MESSAGE_BYTES,
    ArenaReply,
    ArenaRequest,
    DigestQuestion,
    DigestReport,
    Request,
)
from paceline.store.digest_ledger import DigestLedger, Outbox

_MAX_CONNECTIONS = 4096
_SOCKET_NAME = "store"
_log = logging.getLogger(__name__)

Lookup = Callable[[ArenaRequest], int]


class ArenaServer:
    """Serves until `close`. `lookup` returns the descriptor to pass or raises SyncError; it must not block.

    `directory` must exist, be the user's alone, and is removed by who made it; arenas are of one `kind`.
    """

    def __init__(self, directory: str, lookup: Lookup, kind: ArenaKind = "memfd") -> None:
        self.address = str(Path(directory) / _SOCKET_NAME)
        self._lookup = lookup
        self._kind = kind
        self._grants: dict[socket.socket, ArenaRequest] = {}
        self._connections: set[socket.socket] = set()
        self._ledger = DigestLedger()
        self._mutex = threading.Lock()  # grants and ledger: the owner asks from its own threads
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(self.address) as path:
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

    def forget_digests(self, arena_id: str) -> None:
        """The arena is about to be written: what was hashed of it is void."""
        with self._mutex:
            self._ledger.forget(arena_id)

    def close(self) -> None:
        """Stop serving and remove the socket. Leases go on; asking becomes an error."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        Path(self.address).unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ready = key.fileobj
                if ready is self._woken:
                    self._end()
                    return
                if ready is self._listener:
                    self._accept()
                elif isinstance(ready, socket.socket) and ready in self._connections and not self._answer(ready):
                    self._drop(ready)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # The client may be gone already, or this process may be out of descriptors for the moment.
            _log.warning("store.accept_failed: %s", error)
            return
        if len(self._connections) >= _MAX_CONNECTIONS or peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> bool:
        """Serve one message; False when the connection has ended or does not keep to the protocol."""
        try:
            packet = connection.recv(MAX_MESSAGE_BYTES + 1)
            if not packet or len(packet) > MAX_MESSAGE_BYTES:
                return False
            request: Request = msgspec.msgpack.decode(packet, type=Request)
            if isinstance(request, ArenaRequest):
                self._pass_arena(connection, request)
                return True
            return self._about_digest(connection, request)
        except (OSError, msgspec.MsgspecError, RecursionError) as error:  # the last: fields nested too deeply
            _log.warning("store.connection_dropped: %s", error)
            return False

    def _pass_arena(self, connection: socket.socket, request: ArenaRequest) -> None:
        try:
            fd = self._lookup(request)
        except SyncError as error:
            connection.send(msgspec.msgpack.encode(ArenaReply(error.message[:1024])))
            return
        # Known by name before it can hold a lock.
        with self._mutex:
            self._grants[connection] = request
        socket.send_fds(connection, [msgspec.msgpack.encode(ArenaReply(None, self._kind))], [fd])

    def _about_digest(self, connection: socket.socket, request: DigestQuestion | DigestReport) -> bool:
        with self._mutex:
            grant = self._grants.get(connection)
            if grant is None:
                return False
            if isinstance(request, DigestQuestion):
                where = (grant.arena_id, grant.version, request.claim)
                outbox = self._ledger.ask(connection, grant.holder, where, request.scope)
            else:
                outbox = self._ledger.report(connection, request.digest)
        self._send(outbox)
        return True

    def _send(self, outbox: Outbox) -> None:
        for reader, reply in outbox:
            assert isinstance(reader, socket.socket)
            try:
                reader.send(msgspec.msgpack.encode(reply))
            except OSError as error:
                # It has ended; its own turn in the selector, which sees the end, drops it.
                _log.warning("store.reply_lost: %s", error)

    def _drop(self, connection: socket.socket) -> None:
        with self._mutex:
            self._grants.pop(connection, None)
            outbox = self._ledger.gone(connection)
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()
        self._send(outbox)

    def _end(self) -> None:
        for connection in list(self._connections):
            self._selector.unregister(connection)
            connection.close()
        with self._mutex:
            self._grants.clear()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        self._woken.close()
