"""Whether a version is sent as a delta, and its bytes: decided anew for each version, beside the next training step.

full   never
delta  whenever the base is still here, unless it would take more bytes than the full version
auto   a sample of the elements is compared first: where more than `DENSE_SHARE` of them differ nothing is encoded;
       a delta of more than `WORTHWHILE_SHARE` of the full bytes is not sent
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from paceline.checkpoint_engine.snapshots import Snapshot
from paceline.core.manifest import DeltaRecord
from paceline.weights.delta import EncodedDelta, encode, sampled_share
from paceline.weights.delta.planes import Level

DeltaMode = Literal["auto", "full", "delta"]

DENSE_SHARE = 0.25
WORTHWHILE_SHARE = 0.5


@dataclass(frozen=True)
class Attempt:
    """What came of comparing two versions: `delta` is None where the full version is sent; `changed_share` is None
    where nothing was compared.
    """

    delta: EncodedDelta | None = None
    seconds: float = 0.0
    changed_share: float | None = None

    def record(self, arena_id: str, offset: int = 0) -> DeltaRecord | None:
        """The delta as it is announced, lying there."""
        if self.delta is None:
            return None
        header = self.delta.header
        return DeltaRecord(
            base_version=header.base_version,
            base_digest=header.base_digest,
            nbytes=len(self.delta.data),
            changed=header.changed,
            elements=header.total,
            level=header.level,
            arena_id=arena_id,
            offset=offset,
        )


class DeltaEncoder:
    """One sender's deltas: `level` as in `weights.delta.encode`; of the process's `threads` a quarter encode, since the
    next training step has the others.
    """

    def __init__(self, mode: DeltaMode, *, level: Level, threads: int) -> None:
        self.mode = mode
        self._level = level
        self._threads = max(1, threads // 4)

    def encode(self, base: Snapshot | None, target: Snapshot) -> Attempt:
        """Compare and, where that is worth it, encode."""
        if self.mode == "full" or base is None:
            return Attempt()
        began = time.perf_counter()
        if self.mode == "auto" and (share := sampled_share(base.tensors, target.tensors)) > DENSE_SHARE:
            return Attempt(None, time.perf_counter() - began, share)
        delta = encode(
            base.tensors,
            target.tensors,
            self._level,
            base_version=base.manifest.version,
            version=target.manifest.version,
            base_digest=base.manifest.digest,
            target_digest=target.manifest.digest,
            threads=self._threads,
        )
        share = delta.header.changed / max(1, delta.header.total)
        most = target.manifest.total_bytes * (WORTHWHILE_SHARE if self.mode == "auto" else 1.0)
        # An empty delta has a header all the same, which may be more than a tiny model.
        is_small = len(delta.data) <= most or (self.mode == "delta" and not delta.header.changed)
        return Attempt(delta if is_small else None, time.perf_counter() - began, share)
