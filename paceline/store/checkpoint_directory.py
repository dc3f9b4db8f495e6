"""Checkpoints as directories, each one transaction: `<root>/global_step_<n>/`, whole or not there.

    written as `.saving-<n>` -> files, digests.json, COMPLETE last, all synced -> renamed -> older ones removed

Law: a checkpoint counts if its marker vouches for `digests.json` and that for every file, by size and digest. What is
torn, truncated or foreign is refused with the reason, never loaded. There is no pointer to the newest one that could
be wrong. A writer that fails leaves the checkpoints before it as they were; what it left over is cleared at the next
start. The newest checkpoint with finite weights is kept whatever comes after it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash

from paceline.core.errors import CheckpointError
from paceline.store.token_journal import superseded

DIGESTS_FILE = "digests.json"
MARKER_FILE = "COMPLETE"
FORMAT = 1
_NAME = re.compile(r"global_step_(\d+)")
_LEFT_OVER = re.compile(r"\.(saving|replaced|removing)-.*")
_CHUNK = 1 << 20


class FileDigest(msgspec.Struct, frozen=True):
    """Size and XXH3-128 digest (hex) of one file."""

    bytes: int
    digest: str


class CheckpointDigests(msgspec.Struct, frozen=True):
    """`digests.json`: what the checkpoint is of, and every file in it but itself and the marker."""

    format: int
    life: int
    step: int
    finite: bool
    files: dict[str, FileDigest]


class CheckpointDirectory:
    """A `CheckpointStore` below `root`, which is made with the first one; `journal` is where the token journals are."""

    def __init__(self, root: Path, *, life: int, keep: int, journal: Path) -> None:
        self._root = root
        self._life = life
        self._keep = keep
        self._journal = journal
        self._superseded: list[Path] = []

    def begin(self) -> None:
        """The cut is about to be taken."""
        self._superseded = superseded(self._journal, self._life)

    def save(self, step: int, write_state: Callable[[str], bool], parts: Mapping[str, bytes]) -> int:
        """Write the checkpoint of update `step`; returns its bytes.

        Raises:
            CheckpointError: the disk did not take it; what was there before is whole.
        """
        saving = self._root / f".saving-{step}"
        try:
            shutil.rmtree(saving, ignore_errors=True)
            saving.mkdir(parents=True)
            finite = write_state(str(saving))
            for name, data in parts.items():
                (saving / name).write_bytes(data)
            total = self._seal(saving, step, finite)
            self._publish(saving, step)
        except OSError as error:
            shutil.rmtree(saving, ignore_errors=True)
            raise CheckpointError(f"checkpoint of update {step}: {error.strerror or error}") from error
        self._remove_older()
        for path in self._superseded:
            path.unlink(missing_ok=True)
        self._superseded = []
        return total

    def _seal(self, saving: Path, step: int, finite: bool) -> int:
        names = sorted(path.name for path in saving.iterdir())
        files = {name: _digest_of(saving / name) for name in names}
        digests = msgspec.json.encode(CheckpointDigests(FORMAT, self._life, step, finite, files))
        (saving / DIGESTS_FILE).write_bytes(digests)
        for name in (*names, DIGESTS_FILE):
            _sync(saving / name)
        (saving / MARKER_FILE).write_text(xxhash.xxh3_128_hexdigest(digests), encoding="ascii")
        _sync(saving / MARKER_FILE)
        _sync(saving)
        return sum(file.bytes for file in files.values()) + len(digests)

    def _publish(self, saving: Path, step: int) -> None:
        target = self._root / f"global_step_{step}"
        if target.exists():  # torn, or of an earlier life's lost branch: nothing that this run could go on from
            replaced = self._root / f".replaced-{step}"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        saving.rename(target)
        _sync(self._root)
        clear_left_overs(self._root)

    def _remove_older(self) -> None:
        kept = 0
        finite_kept = False
        for path, digests in _whole(self._root):
            wanted = kept < self._keep or (digests.finite and not finite_kept)
            kept += wanted
            finite_kept = finite_kept or (digests.finite and wanted)
            if not wanted:
                # Renamed first: half of a checkpoint never bears the name of one.
                removing = path.rename(self._root / f".removing-{digests.step}")
                shutil.rmtree(removing, ignore_errors=True)


def clear_left_overs(root: Path) -> None:
    """Remove what writers that were ended have left; to be called when nobody writes."""
    if root.is_dir():
        for path in root.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def newest_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, every byte of it verified, and a line for each newer one that was refused.

    Newest is the latest life, and in it the latest update. One with weights that are not finite is taken only where
    there is no other.
    """
    refused: list[str] = []
    second_choice: Path | None = None
    for path in sorted(_named(root), key=_order, reverse=True):
        try:
            digests = verify_checkpoint(path)
        except CheckpointError as error:
            refused.append(error.message)
            continue
        if digests.finite:
            return path, refused
        refused.append(f"{path.name}: its weights are not finite")
        second_choice = second_choice or path
    return second_choice, refused


def verify_checkpoint(path: Path) -> CheckpointDigests:
    """Check the marker, and every file against its size and digest.

    Raises:
        CheckpointError: it is not whole, or no checkpoint of this format; the line says why.
    """
    digests = _read_digests(path)
    for name, expected in digests.files.items():
        try:
            found = _digest_of(path / name)
        except OSError as error:
            raise CheckpointError(f"{path.name}: {name}: {error.strerror}") from error
        if found.bytes != expected.bytes:
            raise CheckpointError(f"{path.name}: {name} has {found.bytes} bytes, not {expected.bytes}")
        if found.digest != expected.digest:
            raise CheckpointError(f"{path.name}: {name} has another digest than the one that was written")
    return digests


def _read_digests(path: Path) -> CheckpointDigests:
    try:
        marker = (path / MARKER_FILE).read_text(encoding="ascii")
        encoded = (path / DIGESTS_FILE).read_bytes()
        digests = msgspec.json.decode(encoded, type=CheckpointDigests)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: not complete, it has no {Path(str(error.filename)).name}") from error
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    if marker.strip() != xxhash.xxh3_128_hexdigest(encoded):
        raise CheckpointError(f"{path.name}: {MARKER_FILE} does not vouch for this {DIGESTS_FILE}")
    if digests.format != FORMAT:
        raise CheckpointError(f"{path.name}: format {digests.format} is not {FORMAT}")
    return digests


def _named(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []


def _order(path: Path) -> tuple[int, int]:
    try:
        digests = _read_digests(path)
    except CheckpointError:
        return (1 << 62, int(path.name.rpartition("_")[2]))  # first, so that it is named among the refused
    return digests.life, digests.step


def _whole(root: Path) -> list[tuple[Path, CheckpointDigests]]:
    """Checkpoints whose files have their sizes, newest first."""
    found: list[tuple[Path, CheckpointDigests]] = []
    for path in sorted(_named(root), key=_order, reverse=True):
        try:
            digests = _read_digests(path)
            if all((path / name).stat().st_size == file.bytes for name, file in digests.files.items()):
                found.append((path, digests))
        except (CheckpointError, OSError):
            continue
    return found


def _digest_of(path: Path) -> FileDigest:
    hasher = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return FileDigest(size, hasher.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
