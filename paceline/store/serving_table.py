"""What a replica serves, told so that a process outside can check it without asking the replica anything but addresses.

The replica writes a table: its pid, the version it says it serves, and the address of every tensor its engine reads.
The other process reads those bytes out of the replica's memory, takes the tree digest itself, and needs no torch for
it. The replica writes the table after it has bound a version and before it releases the one before; where its memory is
overwritten it says so first, and nothing else until the new version is proved. A table that changed while its bytes
were read is read again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import structs
from msgspec.structs import replace

from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.manifest import WeightManifest
from paceline.weights.tree_digest import LEAF_BYTES, leaf_digest, root_digest, tensor_digest

if TYPE_CHECKING:
    import torch

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MAX_TABLE_BYTES = 1 << 29
_SETTLE_SECONDS = 0.05
_PLACES_KEPT = 8
_AT_CWD = -100
_RENAME_EXCHANGE = 2


_Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class ServedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name of the engine: `nbytes` dense bytes at `address` of the replica. Tied names share an address."""

    name: str
    dtype: str
    shape: tuple[_Place, ...]
    address: _Place
    nbytes: _Place


class ServedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica says it serves. `started` is its start in ticks since boot: a pid alone may be used again.
    While it is `changing` it says nothing of any tensor.
    """

    replica: str
    pid: int
    started: int
    version: int
    digest: str
    tensors: tuple[ServedTensor, ...]
    aliases: dict[str, str]
    changing: bool = False


class FileServingBoard:
    """Implements `core.ports.ServingBoard`: one file `<directory>/<replica_id>.json`, replaced as a whole.

    Where the kernel lets only ancestors read a process's memory (Yama), this process allows other processes of its
    user too.
    """

    def __init__(self, directory: str, replica_id: str) -> None:
        self._path = Path(directory) / f"{replica_id}.json"
        self._replica = replica_id
        self._written: ServedWeights | None = None  # without tensors
        # By the first address: versions take turns in few places, and most of a table says where those are.
        self._described: dict[int, tuple[list[object], msgspec.Raw]] = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def publish(self, version: int, digest: str, manifest: WeightManifest, served: Mapping[str, torch.Tensor]) -> None:
        """Write what the engine serves from now on, by the names of the manifest.

        Raises:
            SyncError: the engine serves a tensor whose bytes are not dense.
        """
        strided = sorted(name for name, tensor in served.items() if not tensor.is_contiguous())
        if strided:
            raise SyncError(f"{self._replica} serves tensors whose bytes are not dense: {', '.join(strided)}")
        pid = os.getpid()
        table = ServedWeights(self._replica, pid, _start_ticks(pid), version, digest, (), manifest.aliases)
        self._write(table, self._places(served))

    def withdraw(self) -> None:
        """Say that the memory changes; before the first table there is nothing to take back."""
        if self._written is not None:
            self._write(replace(self._written, aliases={}, changing=True), msgspec.Raw(b"[]"))

    def _places(self, served: Mapping[str, torch.Tensor]) -> msgspec.Raw:
        """Where each tensor lies, encoded; as before, where these places were described before."""
        from paceline.weights.dtypes import dtype_name

        layout: list[object] = [(name, t.data_ptr(), t.dtype, t.shape) for name, t in served.items()]
        first = next((tensor.data_ptr() for tensor in served.values()), 0)
        known, encoded = self._described.get(first, ([], msgspec.Raw(b"[]")))
        if known != layout:
            tensors = [
                ServedTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.data_ptr(), tensor.nbytes)
                for name, tensor in served.items()
            ]
            encoded = msgspec.Raw(msgspec.json.encode(tensors))
            if len(self._described) >= _PLACES_KEPT:
                self._described.clear()
            self._described[first] = (layout, encoded)
        return encoded

    def _write(self, table: ServedWeights, tensors: msgspec.Raw) -> None:
        part = self._path.with_suffix(".json.part")
        with part.open("r+b" if part.exists() else "wb") as file:
            file.write(msgspec.json.encode({**structs.asdict(table), "tensors": tensors}))
            file.truncate()
        _exchange(part, self._path)
        self._written = table


def _exchange(part: Path, path: Path) -> None:
    """Let the new table have the path. The one before becomes the next part: what is renamed over a file has its blocks
    allocated first, which takes longer than all the rest.
    """
    exchanged = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchanged is None or exchanged(_AT_CWD, os.fsencode(part), _AT_CWD, os.fsencode(path), _RENAME_EXCHANGE) != 0:
        part.replace(path)  # the first one, and where the kernel or the filesystem cannot


def read_served(path: str) -> ServedWeights:
    """The table at `path`.

    Raises:
        SyncError: there is none, or it cannot be read.
    """
    try:
        return _decoded(path)
    except SyncError:
        return _decoded(path)  # one that was opened two tables ago may be overwritten while it is read


def _decoded(path: str) -> ServedWeights:
    try:
        if Path(path).stat().st_size > _MAX_TABLE_BYTES:
            raise SyncError(f"{path} is too large for a table of served weights")
        return msgspec.json.decode(Path(path).read_bytes(), type=ServedWeights)
    except OSError as error:
        raise SyncError(f"no replica serves under {path} ({error.strerror})") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SyncError(f"{path} is no table of served weights: {error}") from error


def hash_served(path: str, deadline_seconds: float = 10.0) -> tuple[int, str]:
    """The version that the replica says it serves, and the hex root digest of the bytes it really reads.

    A digest that is not the table's is returned only when a second reading of the same table finds it again.

    Raises:
        SyncError: there is no table, the replica is gone, or its memory may not be read.
        DeadlineExceeded: the replica changed its weights faster than they can be read.
    """
    end = time.monotonic() + deadline_seconds
    before: tuple[ServedWeights, str | None] | None = None
    while True:
        table = read_served(path)
        digest = _digest_of(table)
        if not table.changing and read_served(path) == table:
            if digest is not None and (digest == table.digest or before == (table, digest)):
                return table.version, digest
            if before == (table, None) and digest is None:
                raise SyncError(f"{table.replica} (pid {table.pid}) serves from addresses that cannot be read")
            before = (table, digest)
        if time.monotonic() >= end:
            doing = "change or cannot be proved" if table.changing else "did not hold still"
            message = f"the weights of {table.replica} {doing}, for {deadline_seconds} s"
            raise DeadlineExceeded(message, table.replica, deadline_seconds)
        time.sleep(_SETTLE_SECONDS)


def _digest_of(table: ServedWeights) -> str | None:
    """Root digest of the bytes at the table's addresses; None where an address is not mapped (any more)."""
    try:
        if _start_ticks(table.pid) != table.started:
            raise SyncError(f"{table.replica} (pid {table.pid}) is gone; the pid belongs to another process")
        memory = os.open(f"/proc/{table.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise SyncError(f"the memory of {table.replica} (pid {table.pid}) may not be read by this process") from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SyncError(f"{table.replica} (pid {table.pid}) is gone") from error
    try:
        return _root_of(table, memory)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EFAULT):
            return None
        raise
    finally:
        os.close(memory)


def _root_of(table: ServedWeights, memory: int) -> str:
    by_place: dict[tuple[int, int], bytes] = {}
    entries: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for tensor in table.tensors:
        place = (tensor.address, tensor.nbytes)
        if place not in by_place:
            by_place[place] = _tensor_digest(memory, tensor)
        entries[tensor.name] = (tensor.dtype, tensor.shape, by_place[place])
    # An alias that does not hold the bytes of its stored tensor is none: it counts on its own and changes the root.
    aliases = {
        alias: stored
        for alias, stored in table.aliases.items()
        if alias in entries and entries[alias] == entries.get(stored)
    }
    return root_digest({name: entry for name, entry in entries.items() if name not in aliases}, aliases)


def _tensor_digest(memory: int, tensor: ServedTensor) -> bytes:
    buffer = bytearray(min(LEAF_BYTES, tensor.nbytes))
    leaves: list[bytes] = []
    for start in range(0, tensor.nbytes, LEAF_BYTES):
        leaf = memoryview(buffer)[: min(LEAF_BYTES, tensor.nbytes - start)]
        if os.preadv(memory, [leaf], tensor.address + start) != len(leaf):
            raise OSError(errno.EIO, "short read")
        leaves.append(leaf_digest(leaf))
    return tensor_digest(leaves)


def _start_ticks(pid: int) -> int:
    """Field 22 of `/proc/PID/stat`; the fields are counted from after the command's closing bracket."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[19])
