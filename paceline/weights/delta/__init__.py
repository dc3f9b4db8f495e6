"""The lossless delta between two versions of the weights: bits are compared, small, exact, and can be taken back.

Sender: `encode`. Receiver: `read_delta`, then `prepare` with `apply` and `subtract` (in place), or `copy_and_apply`.
"""

from __future__ import annotations

from paceline.weights.delta.apply import Cursor, PreparedDelta, apply, copy_and_apply, prepare, subtract
from paceline.weights.delta.encode import EncodedDelta, count_changes, encode, sampled_share
from paceline.weights.delta.message import Delta, DeltaHeader, decode_header, read_delta
from paceline.weights.delta.warm_up import warm_up

__all__ = [
    "Cursor",
    "Delta",
    "DeltaHeader",
    "EncodedDelta",
    "PreparedDelta",
    "apply",
    "copy_and_apply",
    "count_changes",
    "decode_header",
    "encode",
    "prepare",
    "read_delta",
    "sampled_share",
    "subtract",
    "warm_up",
]
