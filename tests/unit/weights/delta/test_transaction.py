"""In place: a stop at any run, however it comes, is gone on with or taken back to the base bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.weights.delta import PreparedDelta, apply, copy_and_apply, message, prepare, read_delta, subtract
from paceline.weights.delta.planes import Level
from tests.unit.weights.delta.cases import (
    BASE_DIGEST,
    LEVELS,
    changed_copy,
    copies,
    encoded,
    random_tensor,
    same_bits,
    trained,
)


class StopsAt(Mapping[str, torch.Tensor]):
    """Tensors of an engine that fails when tensor number `stop` is asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor], stop: int) -> None:
        self._tensors = tensors
        self._left = stop

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._left == 0:
            raise RuntimeError(f"engine failed at {name}")
        self._left -= 1
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sparse, dense, unchanged and one-byte tensors."""
    draw = np.random.default_rng(5)
    pairs = {f"layer.{index}": trained(4000 + 64 * index, 1e-5, index) for index in range(4)}
    base = {name: old for name, (old, _) in pairs.items()}
    target = {name: new for name, (_, new) in pairs.items()}
    base["other"] = random_tensor(torch.float32, (900,), draw)
    target["other"] = random_tensor(torch.float32, (900,), draw)
    base["same"] = target["same"] = torch.ones(300)
    base["mask"] = random_tensor(torch.bool, (500,), draw)
    target["mask"] = changed_copy(base["mask"], 0.5, draw)
    return base, target


def prepared_for(
    base: dict[str, torch.Tensor], target: dict[str, torch.Tensor], level: Level, threads: int = 1
) -> PreparedDelta:
    return prepare(read_delta(encoded(base, target, level).data), base, base_digest=BASE_DIGEST, threads=threads)


@pytest.mark.parametrize("level", LEVELS)
def test_a_stop_at_every_tensor_is_taken_back(level: Level) -> None:
    base, target = versions()
    prepared = prepared_for(base, target, level)
    assert len(prepared.steps) == 6
    for stop in range(len(prepared.steps)):
        tensors, cursor = copies(base), prepared.cursor()
        with pytest.raises(RuntimeError, match="engine failed"):
            apply(prepared, StopsAt(tensors, stop), cursor)
        assert cursor.applied == stop
        assert same_bits(tensors, base) == (stop == 0)
        subtract(prepared, tensors, cursor)
        assert cursor.applied == 0
        assert same_bits(tensors, base)


@pytest.mark.parametrize("level", LEVELS)
def test_a_stop_is_gone_on_with_in_both_directions(level: Level) -> None:
    base, target = versions()
    prepared = prepared_for(base, target, level)
    tensors, cursor = copies(base), prepared.cursor()
    with pytest.raises(RuntimeError, match="engine failed"):
        apply(prepared, StopsAt(tensors, 2), cursor)
    apply(prepared, tensors, cursor)
    assert same_bits(tensors, target)
    apply(prepared, tensors, cursor)  # nothing is left to do
    assert same_bits(tensors, target)
    with pytest.raises(RuntimeError, match="engine failed"):
        subtract(prepared, StopsAt(tensors, 3), cursor)
    assert cursor.applied == 3
    subtract(prepared, tensors, cursor)
    assert same_bits(tensors, base)


def test_threads_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "RUN_ELEMENTS", 1000)  # many runs in each tensor
    base, target = versions()
    prepared = prepared_for(base, target, "small", threads=3)
    assert len(prepared.steps) > 20
    tensors, cursor = copies(base), prepared.cursor()
    apply(prepared, tensors, cursor, threads=3)
    assert same_bits(tensors, target)
    subtract(prepared, tensors, cursor, threads=3)
    assert same_bits(tensors, base)


def test_runs_cut_a_tensor_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "RUN_ELEMENTS", 1000)
    base, target = versions()
    target["layer.1"] = base["layer.1"].clone()
    target["layer.1"][1500] += 1
    delta = encoded(base, target, "small")
    assert [(run.tensor, run.start) for run in delta.header.runs if run.tensor == 1] == [(1, 1)]
    other = copies(base)
    copy_and_apply(read_delta(delta.data), base, other, base_digest=BASE_DIGEST, threads=2)
    assert same_bits(other, target)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrong_base_is_refused_before_anything_is_touched(level: Level) -> None:
    base, target = versions()
    delta = read_delta(encoded(base, target, level).data)
    with pytest.raises(DigestMismatch, match=f"for a base with digest {BASE_DIGEST}, not {'c' * 32}"):
        prepare(delta, base, base_digest="c" * 32)
    other = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    with pytest.raises(DigestMismatch):
        copy_and_apply(delta, base, other, base_digest="c" * 32)
    assert not any(tensor.any() for tensor in other.values())


def test_other_tensors_are_refused() -> None:
    base, target = versions()
    delta = read_delta(encoded(base, target, "fast").data)
    with pytest.raises(CoverageError):
        prepare(delta, {**base, "same": torch.ones(301)}, base_digest=BASE_DIGEST)
    renamed = {f"x{name}": tensor for name, tensor in base.items()}
    with pytest.raises(CoverageError):
        prepare(delta, renamed, base_digest=BASE_DIGEST)


def test_a_cursor_of_another_delta_is_refused() -> None:
    base, target = versions()
    prepared = prepared_for(base, target, "fast")
    empty = prepared_for(base, copies(base), "fast")
    with pytest.raises(SyncError, match="cursor"):
        apply(prepared, base, empty.cursor())
