"""The snapshot plan: fixed by the first capture, and every later difference is named."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import CoverageError, SyncError
from paceline.weights.snapshot import SnapshotWriter


def writer(dtype: str | None = None, keep: tuple[str, ...] = ()) -> SnapshotWriter:
    return SnapshotWriter(dtype=dtype, keep=keep, nonfinite="error", threads=1)


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(CoverageError, match="no parameters"):
        writer().prepare([])


def test_an_unknown_transfer_type_is_refused() -> None:
    with pytest.raises(SyncError, match="'bf16'"):
        writer("bf16")


def test_only_floats_that_are_not_kept_are_planned_with_the_transfer_type() -> None:
    named = [(name, torch.ones(2, dtype=dtype)) for name, dtype in (("w", torch.float32), ("k", torch.float32))]
    named += [("i", torch.ones(2, dtype=torch.int64)), ("e", torch.ones(2).to(torch.float8_e5m2))]
    plan, _ = writer("bfloat16", ("k",)).prepare(named)
    assert [meta.dtype for meta in plan.tensors] == ["bfloat16", "float32", "int64", "float8_e5m2"]


def test_all_differences_from_the_first_capture_are_named() -> None:
    sent = writer()
    one = torch.ones(2, 3)
    sent.prepare([("a", one), ("b", torch.ones(2)), ("c", torch.ones(2)), ("tied", one), ("same", torch.ones(1))])
    changed = [("a", torch.ones(3, 2)), ("b", torch.ones(2).double()), ("tied", torch.ones(2, 3))]
    changed += [("same", torch.zeros(1)), ("d", torch.ones(1))]
    with pytest.raises(CoverageError) as caught:
        sent.prepare(changed)
    message = caught.value.message
    assert "'a' was float32 [2, 3] and is float32 [3, 2]" in message
    assert "'b' was float32 [2] and is float64 [2]" in message
    assert "'c' is missing" in message
    assert "'d' is new" in message
    assert "'tied' was tied to 'a' and is float32 [2, 3]" in message
    assert "'same'" not in message


def test_a_refused_capture_leaves_the_plan_as_it_was() -> None:
    sent = writer()
    first, _ = sent.prepare([("a", torch.ones(2))])
    with pytest.raises(CoverageError):
        sent.prepare([("b", torch.ones(2))])
    assert sent.prepare([("a", torch.zeros(2))])[0] == first
