"""One finished run for all tests that only look at what a run leaves; every test here is `e2e`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.train_process import SHORT, STOP_SECONDS, Ended, TrainProcess, train

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this directory."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


class Pair:
    """Two runs of one machine at the same time: the second must not touch the first."""

    def __init__(self, runs: tuple[TrainProcess, TrainProcess], ended: tuple[Ended, Ended]) -> None:
        self.runs = runs
        self.ended = ended


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two whole runs side by side, the second with another seed."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    with train(first, SHORT) as one, train(second, [*SHORT, "trainer.seed=1"]) as other:
        other.until(lambda: other.events("run.started"), "its start")
        ended = tuple(run.process.wait(timeout=300) for run in (one, other))
        assert ended == (0, 0), [run.output() for run in (one, other)]
        yield Pair((one, other), (one.end(STOP_SECONDS), other.end(STOP_SECONDS)))


@pytest.fixture(scope="session")
def finished(pair: Pair) -> TrainProcess:
    """A run that has come to its end."""
    return pair.runs[0]
