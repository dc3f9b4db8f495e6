"""What a replica over a server tells processes outside its run, and how they ask that server for its workers' proof.

The memory of a server's workers cannot be hashed from outside (packed on a CPU, on a GPU elsewhere). But each worker
keeps the digest of what entered its model, and says whether it is the one that it is asked about.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.version import Version
from paceline.engine.vllm_commands import Hello, ReceiverSpec
from paceline.engine.vllm_control import VllmWeights
from paceline.engine.vllm_http import VllmHttpServer
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import SystemClock

SUFFIX = ".server"
ANSWER_SECONDS = 10.0


class ServerNote(msgspec.Struct, frozen=True):
    """Which server a replica is driven by; `url` is empty for an engine of the run's own."""

    replica: str
    url: str
    api_key_env: str


def leave_note(spec: RunSpec, replica_id: str) -> None:
    """Tell outside processes; the run's end removes it."""
    rollout = spec.config.rollout
    url = rollout.servers[int(replica_id.rpartition("-")[2])] if rollout.servers else ""
    spec.serving_dir.mkdir(parents=True, exist_ok=True)
    note = ServerNote(replica_id, url, rollout.server_api_key_env)
    (spec.serving_dir / f"{replica_id}{SUFFIX}").write_bytes(msgspec.json.encode(note))


def read_note(path: Path) -> ServerNote:
    """Inverse of `leave_note`.

    Raises:
        SyncError: there is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerNote)
    except (OSError, msgspec.MsgspecError) as error:
        raise SyncError(f"{path} is no note of a server: {error}") from error


async def ask_workers(note: ServerNote, digest_of: Callable[[int], str | None]) -> tuple[int, str]:
    """The version that the server says it serves, and its digest, which every worker says has entered its model.

    `digest_of` is asked, after the server, for the digest that this version was published with.

    Raises:
        SyncError: an engine of the run's own, which nobody outside can ask.
        DigestMismatch: weights that nobody published, or a worker that holds others.
        PacelineError: the server does not answer.
    """
    if not note.url:
        raise SyncError(
            "its vLLM engine is asked by the run alone, and its memory is packed: the proof of its workers for each "
            "version is in the event log (sync.completed: verified)"
        )
    clock = SystemClock()
    server = VllmHttpServer(
        note.url,
        name=note.replica,
        clock=clock,
        make_weights=lambda calls: VllmWeights(
            calls, name=note.replica, receiver=ReceiverSpec("filesystem"), clock=clock
        ),
        hello=Hello(),
        api_key=os.environ.get(note.api_key_env),
        start_seconds=ANSWER_SECONDS,
        call_seconds=ANSWER_SECONDS,
    )
    try:
        await server.start()
        version = await server.weight_version()
        digest = None if version is None else digest_of(version)
        if version is None or digest is None:
            said = "weights of its own" if version is None else f"version {Version.unpack(version)}"
            raise DigestMismatch(f"the server serves {said}, of which the log has no capture")
        await server.confirm(version, digest)
        return version, digest
    finally:
        await server.close()
