"""`paceline verify RUN_DIR`: does each replica of a live run serve what was published?

The bytes are read out of the replica's memory and hashed by this process; what they have to be is the digest in the
event log, taken when the version was captured. Neither the replica's word nor the synchronizer's is trusted. Where a
server holds the weights, its workers are asked for the digest of what has entered their models.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.core.errors import ConfigError, DeadlineExceeded, PacelineError, SyncError
from paceline.core.events import SyncCaptured
from paceline.core.version import Version
from paceline.observability.reader import read_events
from paceline.runtime.worker_proof import SUFFIX, ask_workers, read_note
from paceline.store.serving_table import hash_served


def verify(run_dir: Path) -> int:
    """Print one line per replica; 0 when every one serves what was published, 1 when one does not or cannot be read.

    Raises:
        ConfigError: there is no run in this directory.
        PacelineError: the run has no live replica.
    """
    events = run_dir / "events.jsonl"
    if not events.is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {events}")
    tables = sorted((run_dir / "serving").glob("*.json"))
    notes = sorted((run_dir / "serving").glob(f"*{SUFFIX}"))
    if not tables and not notes:
        raise PacelineError(f"no replica of {run_dir} serves now; a run can be verified while it lives")
    verified = [_verify_one(table, events) for table in tables] + [_verify_server(note, events) for note in notes]
    return 0 if all(verified) else 1


def _verify_server(path: Path, events: Path) -> bool:
    try:
        note = read_note(path)
        version, digest = asyncio.run(ask_workers(note, lambda version: _captured(events).get(version)))
    except PacelineError as error:
        print(f"{path.stem}: cannot be verified: {error.message}")
        return False
    print(
        f"{path.stem}: version {Version.unpack(version)}: each worker of {note.url} has loaded {digest}, as published"
    )
    return True


def _verify_one(table: Path, events: Path) -> bool:
    try:
        version, digest = hash_served(str(table))
    except (SyncError, DeadlineExceeded) as error:
        print(f"{table.stem}: cannot be verified: {error.message}")
        return False
    # The log is read after the replica: the capture of what it serves is in it by now.
    published = _captured(events).get(version)
    name = f"{table.stem}: version {Version.unpack(version)}"
    if published is None:
        print(f"{name}: serves {digest}, but the log has no capture of this version")
        return False
    if published != digest:
        print(f"{name}: MISMATCH: serves {digest}, published {published}")
        return False
    print(f"{name}: verified, serves {digest}")
    return True


def _captured(events: Path) -> dict[int, str]:
    """Version -> the digest that it was captured with."""
    return {r.event.version: r.event.digest for r in read_events(events) if isinstance(r.event, SyncCaptured)}
