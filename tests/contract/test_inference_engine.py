"""What every inference engine promises (`paceline.testing.engine_contract`), on each of them.

A new engine joins by a function in `ENGINES` that makes an `EngineUnderTest`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.testing.engine_contract import ENGINE_CONTRACT, PLACES, EngineUnderTest
from paceline.testing.marker_model import MarkerEngine
from tests.unit.engine.tiny_engines import make_engine, make_model


def embedded(directory: Path) -> EngineUnderTest:
    old, new = make_model("qwen3", directory, seed=0), make_model("qwen3", directory, seed=1)
    return EngineUnderTest(make_engine(directory, max_num_seqs=PLACES), old.state_dict(), new.state_dict())


def marker(directory: Path) -> EngineUnderTest:
    def weights(number: int) -> dict[str, torch.Tensor]:
        made = {name: torch.full((8,), float(number)) for name in ("weight", "head")}
        return {"marker": torch.full((1,), number, dtype=torch.int64), **made}

    return EngineUnderTest(MarkerEngine(places=PLACES), weights(1), weights(2))


ENGINES: dict[str, Callable[[Path], EngineUnderTest]] = {"embedded": embedded, "marker": marker}


@pytest.mark.parametrize("promise", ENGINE_CONTRACT, ids=lambda promise: str(promise.__name__))
@pytest.mark.parametrize("kind", sorted(ENGINES))
def test_it_keeps(kind: str, promise: Callable[[EngineUnderTest], None], tmp_path: Path) -> None:
    promise(ENGINES[kind](tmp_path))


class ForgetsItsLabel(MarkerEngine):
    """Labels tokens with the version that was bound first."""

    @property
    def version(self) -> int | None:
        return None if super().version is None else 3


def test_a_broken_promise_is_found() -> None:
    case = marker(Path())
    failed = []
    for promise in ENGINE_CONTRACT:
        try:
            promise(EngineUnderTest(ForgetsItsLabel(places=PLACES), case.old, case.new))
        except AssertionError:
            failed.append(promise.__name__)
    assert "what_is_served_is_the_bound_memory" in failed
