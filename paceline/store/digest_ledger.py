"""Which versions of a node have been hashed, by whom, and who waits for it: one reader hashes, the others rely on it.

Why a reader may rely on a digest that another reader of its node has taken:

1. Both hold a lease on the same arena (its id is in the stamp, under the lock) at the same version, and map the same
   physical pages: there is one copy of these bytes on the node.
2. The bytes of a version do not change from the end of its capture to the next capture into that arena, lease or no
   lease: the writer's map is read-only in between, a memfd admits no other writer, and a version never comes back.
   So it does not matter which of the two looked first.
3. Both were told the same of them: names, types, shapes and places, whose digest (the claim) is a part of the question.
   A reader whose manifest says something else hashes for itself, and finds that it is not what was published.
4. The store passes on what the reader computed from the mapped bytes, never the figure of its own capture; a reader
   compares it with the published digest itself, and a wrong report can only make a sync fail.

What remains is that the other reader runs the same code under the same user (the socket admits no other) and that
memory keeps what it holds. Each reader still proves on its own which arena it leases and which addresses it serves.

States per (arena, version, claim, scope): nobody -> computing(reader) -> known; back to nobody when the reader's
connection ends without a report, and its place is given to the first who waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from paceline.store.channel_messages import DigestReply, DigestScope


@dataclass
class _Entry:
    computing: Hashable | None = None
    digest: str = ""
    by: str = ""
    waiting: list[Hashable] = field(default_factory=list)


Where = tuple[str, int, str]  # arena, version, claim
Outbox = list[tuple[Hashable, DigestReply]]


class DigestLedger:
    """Pure state: readers are any hashable keys, and every call returns the replies to send."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Where, DigestScope], _Entry] = {}
        self._names: dict[Hashable, str] = {}

    def ask(self, reader: Hashable, name: str, where: Where, scope: DigestScope) -> Outbox:
        """A reader that holds its lease asks; it gets exactly one reply now, and another later if that says "wait"."""
        self._names[reader] = name
        full = self._entries.get((where, "full"))
        if scope == "changed" and full is not None and full.digest:
            return [(reader, DigestReply("known", full.digest, full.by))]
        entry = self._entries.setdefault((where, scope), _Entry())
        if entry.digest:
            return [(reader, DigestReply("known", entry.digest, entry.by))]
        if entry.computing is None:
            entry.computing = reader
            return [(reader, DigestReply("compute"))]
        entry.waiting.append(reader)
        return [(reader, DigestReply("wait", by=self._names[entry.computing]))]

    def report(self, reader: Hashable, digest: str) -> Outbox:
        """The reader that was told to compute has done so; what others report is ignored."""
        for entry in self._entries.values():
            if entry.computing == reader and not entry.digest:
                entry.digest, entry.by, entry.computing = digest, self._names[reader], None
                waiting, entry.waiting = entry.waiting, []
                return [(other, DigestReply("known", digest, entry.by)) for other in waiting]
        return []

    def gone(self, reader: Hashable) -> Outbox:
        """The reader's connection has ended."""
        self._names.pop(reader, None)
        outbox: Outbox = []
        for entry in self._entries.values():
            if reader in entry.waiting:
                entry.waiting.remove(reader)
            if entry.computing == reader and not entry.digest:
                entry.computing = entry.waiting.pop(0) if entry.waiting else None
                if entry.computing is not None:
                    outbox.append((entry.computing, DigestReply("compute")))
                    name = self._names[entry.computing]
                    outbox += [(other, DigestReply("wait", by=name)) for other in entry.waiting]
        self._entries = {
            key: entry for key, entry in self._entries.items() if entry.digest or entry.computing is not None
        }
        return outbox

    def forget(self, arena_id: str) -> None:
        """The arena is written anew: nothing is known of it, and nobody holds it."""
        for key in [key for key in self._entries if key[0][0] == arena_id]:
            del self._entries[key]
