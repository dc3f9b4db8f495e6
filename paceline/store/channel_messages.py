"""What goes over the store's socket: one message is one packet, checked against a schema and bounded in size.

reader                            store
ArenaRequest                  ->
                              <-  ArenaReply, with the descriptor unless it has an error
DigestQuestion                ->  (only while the lease lasts)
                              <-  DigestReply: known, yours to compute, or wait (then another one follows)
DigestReport                  ->  (only after "compute"; not answered)
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from paceline.store.arena_backing import ArenaKind

MAX_MESSAGE_BYTES = 4096

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# What was hashed: every byte, or the tensors that differ from a version that had been hashed whole before.
DigestScope = Literal["full", "changed"]


class ArenaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="arena"):
    """Ask for the arena that holds `version`; `holder` is the name under which the lease is known."""

    arena_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    version: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    holder: _Name


class DigestQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="question"):
    """Ask whether a reader of this node has hashed the leased version already, under the same `claim`: a digest of what
    the reader's manifest says lies where.
    """

    scope: DigestScope
    claim: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class DigestReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """The hex root digest that this reader has taken of the leased bytes."""

    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


Request = ArenaRequest | DigestQuestion | DigestReport


class ArenaReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="arena"):
    """`error` is None when the descriptor comes along, else why it does not."""

    error: Annotated[str, msgspec.Meta(max_length=1024)] | None
    kind: ArenaKind = "memfd"


class DigestReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="digest"):
    """`known`: `by` has taken `digest`. `compute`: take it and report it. `wait`: `by` is at it."""

    verdict: Literal["known", "compute", "wait"]
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    by: Annotated[str, msgspec.Meta(max_length=256)] = ""


Reply = ArenaReply | DigestReply
