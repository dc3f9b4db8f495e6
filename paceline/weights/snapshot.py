"""From live tensors to the bytes of one version: plan once, then write the same plan again and again.

The first capture fixes names, types, shapes, ties and offsets; each later one must bring the same, and is refused with
every offending name before a byte is copied. The writer knows nothing of where the bytes lie: it is handed a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from msgspec.structs import replace

from paceline.core.errors import CoverageError
from paceline.core.manifest import TensorMeta, WeightManifest
from paceline.weights.coverage import matches
from paceline.weights.digesting_copy import CopyJob, copy_and_digest
from paceline.weights.dtypes import dtype_name, dtype_of, is_castable
from paceline.weights.finite import nonfinite_error, not_allowed
from paceline.weights.layout import plan_layout, stored_views
from paceline.weights.named_tensors import split_aliases
from paceline.weights.tree_digest import root_digest


@dataclass(frozen=True)
class SnapshotPlan:
    """What every version of one model looks like. `total_bytes` is the arena space a version takes."""

    tensors: tuple[TensorMeta, ...]
    aliases: dict[str, str]
    total_bytes: int


class SnapshotWriter:
    """Plans at the first `prepare`, checks at each later one, and copies in `publish`.

    `dtype` is the transfer type of real floating tensors of two bytes or more (None: as they are); tensors that
    `keep` names (names or shell patterns) are never cast, and those that `any_value` names may hold NaN and infinity.
    `threads` is how many copy and hash.
    """

    def __init__(
        self,
        *,
        dtype: str | None,
        keep: tuple[str, ...],
        nonfinite: Literal["error", "skip", "off"],
        threads: int,
        any_value: tuple[str, ...] = (),
    ) -> None:
        self._dtype = None if dtype is None else dtype_of(dtype)
        self._keep = keep
        self._nonfinite = nonfinite
        self._any_value = any_value
        self._threads = threads
        self._plan: SnapshotPlan | None = None

    def prepare(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[SnapshotPlan, dict[str, torch.Tensor]]:
        """The plan, and the tensors to store by name.

        Raises:
            CoverageError: no tensors, a name twice, or not what the first capture had; all names are in the message.
            SyncError: a tensor that cannot be moved.
        """
        stored, aliases = split_aliases(named_tensors)
        if not stored:
            raise CoverageError("no parameters were sent")
        shapes = {name: (self._target_dtype(name, tensor), tuple(tensor.shape)) for name, tensor in stored.items()}
        if self._plan is not None:
            _check_same(self._plan, shapes, aliases)
            return self._plan, stored
        tensors, total_bytes = plan_layout(shapes)
        self._plan = SnapshotPlan(tensors, aliases, total_bytes)
        return self._plan, stored

    def publish(
        self, stored: dict[str, torch.Tensor], buffer: torch.Tensor, *, version: int, arena_id: str, address: str
    ) -> WeightManifest:
        """Copy into `buffer` (uint8, at least the plan's bytes) and describe the full version that it then holds.

        Raises:
            NonFiniteWeights: the guard is on and written values are NaN or infinite; the buffer is then of no use.
        """
        assert self._plan is not None, "prepare comes before publish"
        targets = stored_views(buffer, self._plan.tensors)
        jobs = [CopyJob(name, stored[name], target) for name, target in targets.items()]
        result = copy_and_digest(jobs, self._nonfinite, self._threads)
        if bad := not_allowed(result.nonfinite, self._any_value):
            raise nonfinite_error(bad)
        entries = {meta.name: (meta.dtype, meta.shape, result.digests[meta.name]) for meta in self._plan.tensors}
        return WeightManifest(
            version=version,
            tensors=tuple(replace(meta, digest=result.digests[meta.name].hex()) for meta in self._plan.tensors),
            aliases=self._plan.aliases,
            total_bytes=self._plan.total_bytes,
            digest=root_digest(entries, self._plan.aliases),
            arena_id=arena_id,
            address=address,
        )

    def _target_dtype(self, name: str, tensor: torch.Tensor) -> str:
        cast = self._dtype is not None and is_castable(tensor.dtype) and not matches(name, self._keep)
        return dtype_name(self._dtype if cast and self._dtype is not None else tensor.dtype)


def _check_same(plan: SnapshotPlan, shapes: dict[str, tuple[str, tuple[int, ...]]], aliases: dict[str, str]) -> None:
    planned = {meta.name: (meta.dtype, meta.shape) for meta in plan.tensors}
    before: dict[str, object] = {**planned, **plan.aliases}
    now: dict[str, object] = {**shapes, **aliases}
    reasons = [f"{name!r} is missing" for name in before if name not in now]
    reasons += [f"{name!r} is new" for name in now if name not in before]
    reasons += [
        f"{name!r} was {_described(before[name])} and is {_described(now[name])}"
        for name in before
        if name in now and before[name] != now[name]
    ]
    if reasons:
        raise CoverageError(f"the tensors are not those of the first capture: {'; '.join(reasons)}")


def _described(entry: object) -> str:
    if isinstance(entry, tuple):
        return f"{entry[0]} {list(entry[1])}"
    return f"tied to {entry!r}"
