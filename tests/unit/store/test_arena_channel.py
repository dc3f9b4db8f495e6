"""The channel: private, bounded, schema-checked, and every wait has an end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.store.arena_channel import LeaseConnection, request_arena
from paceline.store.arena_server import ArenaServer
from paceline.store.channel_messages import MAX_MESSAGE_BYTES, ArenaRequest

REQUEST = ArenaRequest(arena_id="a1", version=3, holder="replica-0")
PATIENCE = 60.0  # seconds, for what comes at once


def nothing(request: ArenaRequest) -> int:
    raise SyncError(f"the weight store has no arena {request.arena_id}")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[int]:
    """A descriptor to pass."""
    fd = os.memfd_create("shared")
    yield fd
    os.close(fd)


@pytest.fixture
def server(tmp_path: Path, shared: int) -> Iterator[ArenaServer]:
    made = ArenaServer(str(tmp_path), lambda request: shared if request.arena_id == "a1" else nothing(request))
    yield made
    made.close()


def raw(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE)
    connection.connect(address)
    return connection


def wait_until_no_holder(server: ArenaServer) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.holders("a1") != []:
        assert time.monotonic() < deadline, "the holder's name is still there"
        time.sleep(0.01)


def test_a_grant_passes_a_new_descriptor_and_knows_the_name_until_the_end(server: ArenaServer, shared: int) -> None:
    fd, kind, connection = request_arena(server.address, REQUEST, PATIENCE)
    assert os.path.sameopenfile(fd, shared)
    assert fd != shared
    assert not os.get_inheritable(fd)
    assert kind == "memfd"
    assert server.holders("a1") == ["replica-0"]
    os.close(fd)
    connection.close()
    wait_until_no_holder(server)


def test_two_leases_of_one_holder_are_two_connections(server: ArenaServer) -> None:
    grants = [request_arena(server.address, REQUEST, PATIENCE) for _ in range(2)]
    assert server.holders("a1") == ["replica-0"]
    grants[0][2].close()
    grants.append(request_arena(server.address, ArenaRequest("a1", 3, "replica-1"), PATIENCE))
    assert server.holders("a1") == ["replica-0", "replica-1"]
    for fd, _, connection in grants:
        os.close(fd)
        connection.close()


def test_a_refusal_carries_its_reason(server: ArenaServer) -> None:
    with pytest.raises(SyncError, match="no arena a2"):
        request_arena(server.address, ArenaRequest("a2", 3, "replica-0"), PATIENCE)
    assert server.holders("a2") == []


# A field that nobody reads, in thousands of arrays of one element each (msgpack), before the one that tells the kind.
NESTED = b"\x82\xa1a" + b"\x91" * 3000 + b"\xc0" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("arena")


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\x00garbage",
        NESTED,
        msgspec.msgpack.encode({"type": "arena", "arena_id": "a1", "version": 1 << 63, "holder": "r"}),
        b"\x84" + msgspec.msgpack.encode({"type": "arena", "arena_id": "a1", "version": 3})[1:] + b"\xa6holder\xa1\xff",
        msgspec.msgpack.encode({"type": "arena", "arena_id": "a1", "version": "three", "holder": "r"}),
        msgspec.msgpack.encode({"type": "arena", "arena_id": "a1", "version": 3, "holder": "r" * 300}),
        msgspec.msgpack.encode({"type": "arena", "arena_id": "a1", "version": 3, "holder": "r", "extra": 1}),
        msgspec.msgpack.encode({"type": "question", "scope": "full"}),
        msgspec.msgpack.encode({"type": "report", "digest": "d"}),
        b"x" * (MAX_MESSAGE_BYTES + 1),
    ],
)
def test_what_breaks_the_schema_or_the_bound_is_dropped_and_others_are_served(
    server: ArenaServer, packet: bytes
) -> None:
    with raw(server.address) as connection:
        connection.send(packet)
        assert connection.recv(100) == b""
    fd, _, kept = request_arena(server.address, REQUEST, PATIENCE)
    os.close(fd)
    kept.close()


def test_a_store_that_is_gone_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="is gone"):
        request_arena(str(tmp_path / "nowhere" / "store"), REQUEST, PATIENCE)
    server = ArenaServer(str(tmp_path), nothing)
    server.close()
    with pytest.raises(SyncError, match="is gone"):
        request_arena(server.address, REQUEST, PATIENCE)


def test_a_store_that_does_not_answer_is_named(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(str(tmp_path / "store"))
        listener.listen(1)
        with pytest.raises(DeadlineExceeded) as caught:
            request_arena(str(tmp_path / "store"), REQUEST, 0.05)
    assert caught.value.culprit == "weight store"


@pytest.mark.parametrize(
    "reply",
    [
        b"\xc1",
        NESTED,
        msgspec.msgpack.encode({"type": "arena", "error": None}),
        msgspec.msgpack.encode({"type": "digest", "verdict": "known"}),
        b"",
    ],
)
def test_a_reply_that_is_none_is_an_error(tmp_path: Path, reply: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "store"))
    listener.listen(1)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(MAX_MESSAGE_BYTES)
            if reply:
                connection.send(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(SyncError, match="weight store"):
        request_arena(str(tmp_path / "store"), REQUEST, PATIENCE)
    thread.join()
    listener.close()


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path, shared: int) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    server = ArenaServer(str(deep), lambda _: shared)
    fd, _, connection = request_arena(server.address, REQUEST, PATIENCE)
    os.close(fd)
    connection.close()
    server.close()
    assert list(deep.iterdir()) == []


def test_many_clients_at_once_are_all_served(server: ArenaServer) -> None:
    errors: list[Exception] = []

    def ask(index: int) -> None:
        try:
            for _ in range(10):
                fd, _, connection = request_arena(server.address, ArenaRequest("a1", 3, f"replica-{index}"), PATIENCE)
                os.close(fd)
                connection.close()
        except (SyncError, DeadlineExceeded) as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    wait_until_no_holder(server)


# ---- one reader hashes for its node ---------------------------------------------------------------------------------


def leases(server: ArenaServer, count: int) -> list[LeaseConnection]:
    made: list[LeaseConnection] = []
    for index in range(count):
        fd, _, connection = request_arena(server.address, ArenaRequest("a1", 3, f"replica-{index}"), PATIENCE)
        os.close(fd)
        made.append(connection)
    return made


def test_the_second_reader_gets_what_the_first_has_computed(server: ArenaServer) -> None:
    first, second, third = leases(server, 3)
    assert first.ask_digest("full", "c", PATIENCE) == ("", "")
    got: list[tuple[str, str]] = []
    waiting = threading.Thread(target=lambda: got.append(second.ask_digest("full", "c", PATIENCE)))
    waiting.start()
    first.report_digest("d1")
    waiting.join()
    assert got == [("d1", "replica-0")]
    first.close()
    assert third.ask_digest("changed", "c", PATIENCE) == ("d1", "replica-0")
    second.close()
    third.close()


def test_a_reader_that_dies_while_it_computes_passes_its_task_on(server: ArenaServer) -> None:
    first, second = leases(server, 2)
    assert first.ask_digest("full", "c", PATIENCE) == ("", "")
    got: list[tuple[str, str]] = []
    waiting = threading.Thread(target=lambda: got.append(second.ask_digest("full", "c", PATIENCE)))
    waiting.start()
    first.close()
    waiting.join()
    assert got == [("", "")]
    second.close()


def test_a_reader_that_computes_too_long_is_named(server: ArenaServer) -> None:
    first, second = leases(server, 2)
    first.ask_digest("full", "c", PATIENCE)
    with pytest.raises(DeadlineExceeded) as caught:
        second.ask_digest("full", "c", 0.05)
    assert caught.value.culprit == "replica-0"
    first.close()
    second.close()


def test_a_question_to_a_store_that_is_gone_is_an_error(tmp_path: Path, shared: int) -> None:
    server = ArenaServer(str(tmp_path), lambda _: shared)
    (connection,) = leases(server, 1)
    server.close()
    with pytest.raises(SyncError, match="weight store"):
        connection.ask_digest("full", "c", PATIENCE)
    connection.report_digest("d")
    connection.close()
