"""The seam under the checkpoint engine for other nodes: the engine knows no cluster library, the runtime knows one.

Apart from `core.ports`, since no loop is handed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ObjectTransport(Protocol):
    """A store of immutable byte objects that reaches every node of a cluster; one end of it in each process.

    An object crosses to a node once, however many processes of that node get it, and lives until its owner has
    released it and the last buffer over it is gone, wherever that is. Owner's side: `check_room`, `put`, `holders`,
    `release`; reader's side: `get`, `done`. Every method may block for a moment, `get` until its deadline.
    """

    @property
    def node(self) -> str:
        """The node of this end; processes with the same one share the bytes of an object."""
        ...

    def check_room(self, needed_bytes: int) -> None:
        """Raises CapacityError (needed and free) where this node's store cannot hold so many bytes."""
        ...

    def put(self, data: memoryview) -> bytes:
        """Copy the bytes into a new object; returns its reference. Raises SyncError."""
        ...

    def get(self, reference: bytes, *, holder: str, deadline_seconds: float) -> memoryview:
        """The object's bytes, read-only and not copied for this process; `holder` is its name for the owner.

        Raises LookupError where the owner does not offer the object any more; SyncError, WorkerDied or
        DeadlineExceeded, naming the node, where the object or its owner is lost or does not come.
        """
        ...

    def done(self, reference: bytes, *, holder: str) -> None:
        """This reader needs no buffer of the object any more. Only names depend on it, never memory."""
        ...

    def release(self, reference: bytes) -> None:
        """Offer the object no more; its memory is free once nobody uses it."""
        ...

    def holders(self, reference: bytes) -> Sequence[str]:
        """Who still uses a released object; empty once its memory is free."""
        ...
