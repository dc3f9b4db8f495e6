"""An object store inside one process that counts what crosses to which node, and fails when told to.

Each end is an `InProcessObjects` on a named node of one `ObjectCluster`; the cluster stands for the nodes' stores.
"""

from __future__ import annotations

import secrets
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import CapacityError, SyncError


@dataclass
class StoredObject:
    """One object: its bytes at the owner, the copy of each node that got it, and who uses it."""

    data: NDArray[np.uint8]
    owner: str
    offered: bool = True
    copies: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    readers: Counter[str] = field(default_factory=Counter)
    views: list[weakref.ref[NDArray[np.uint8]]] = field(default_factory=list)

    @property
    def in_use(self) -> bool:
        """Whether a buffer that was handed out still exists."""
        return any(view() is not None for view in self.views)


class ObjectCluster:
    """The nodes' stores. `crossed` counts the bytes each node received; `fail_next` is raised by the next `get`."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[bytes, StoredObject] = {}
        self.crossed: Counter[str] = Counter()
        self.fail_next: Exception | None = None

    def sweep(self) -> None:
        """Forget objects that are neither offered nor used."""
        self.objects = {ref: stored for ref, stored in self.objects.items() if stored.offered or stored.in_use}


class InProcessObjects:
    """Implements `core.object_transport.ObjectTransport` for a process on `node`."""

    def __init__(self, cluster: ObjectCluster, node: str) -> None:
        self._cluster = cluster
        self._node = node

    @property
    def node(self) -> str:
        """See the port."""
        return self._node

    def check_room(self, needed_bytes: int) -> None:
        """See the port."""
        free = self._cluster.capacity_bytes
        if needed_bytes > free:
            raise CapacityError(f"weights need {needed_bytes} bytes, the object store of {self._node} has {free} free")

    def put(self, data: memoryview) -> bytes:
        """See the port."""
        self._cluster.sweep()
        used = sum(stored.data.nbytes for stored in self._cluster.objects.values())
        if used + data.nbytes > self._cluster.capacity_bytes:
            raise SyncError(f"the object store of {self._node} is full")
        reference = secrets.token_bytes(8)
        self._cluster.objects[reference] = StoredObject(np.frombuffer(data, dtype=np.uint8).copy(), self._node)
        return reference

    def get(self, reference: bytes, *, holder: str, deadline_seconds: float) -> memoryview:
        """See the port."""
        if (failure := self._cluster.fail_next) is not None:
            self._cluster.fail_next = None
            raise failure
        stored = self._cluster.objects.get(reference)
        if stored is None or not stored.offered:
            raise LookupError("its owner does not offer it any more")
        view = self._local(stored)[:]
        view.flags.writeable = False
        stored.readers[holder] += 1
        stored.views.append(weakref.ref(view))
        return view.data

    def done(self, reference: bytes, *, holder: str) -> None:
        """See the port."""
        stored = self._cluster.objects.get(reference)
        if stored is not None:
            stored.readers[holder] -= 1

    def release(self, reference: bytes) -> None:
        """See the port."""
        self._cluster.objects[reference].offered = False
        self._cluster.sweep()

    def holders(self, reference: bytes) -> Sequence[str]:
        """See the port."""
        self._cluster.sweep()
        stored = self._cluster.objects.get(reference)
        if stored is None:
            return []
        return [name for name, count in stored.readers.items() if count > 0] or ["a reader that has left"]

    def _local(self, stored: StoredObject) -> NDArray[np.uint8]:
        if stored.owner == self._node:
            return stored.data
        if self._node not in stored.copies:
            stored.copies[self._node] = stored.data.copy()
            self._cluster.crossed[self._node] += stored.data.nbytes
        return stored.copies[self._node]
