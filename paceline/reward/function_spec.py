"""Which reward function a process is to run, and the records that cross between it and the rollouter.

Frames are four bytes of length (big-endian) and msgpack; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec

LENGTH_BYTES = 4


class FunctionSpec(msgspec.Struct, frozen=True, tag="spec"):
    """A function `name` of a Python file, or of an importable module where `path` is None.

    `blocked_seconds` is how long an `async def` function may keep its event loop from turning.

    Example: `FunctionSpec("judge.py", "", "compute_score", {"model": "small"}, 3, 1.0, 5.0)`.
    """

    path: str | None
    module: str
    name: str
    arguments: dict[str, Any]
    attempts: int
    wait_seconds: float
    blocked_seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is loaded. `is_async`: many calls may be under way at the same time."""

    is_async: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The function cannot be used; one line that says why."""

    error: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Score one response."""

    number: int
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this call any more."""

    number: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """What a call gave: a score with metrics, or with `error` none. `children`: how many of the process's own live at
    its end, and how many have ended and nobody has reaped.
    """

    number: int
    score: float
    metrics: dict[str, float]
    error: str = ""
    children: tuple[int, int] = (0, 0)


ToProcess = FunctionSpec | Call | Cancel
FromProcess = Ready | Refused | Reply


def frame(record: msgspec.Struct) -> bytes:
    """The bytes of one record on the wire."""
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
