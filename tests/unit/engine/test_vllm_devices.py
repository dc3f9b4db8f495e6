"""Which GPUs an engine takes: its own set while there are enough, in turn where there are too few."""

from __future__ import annotations

import pytest

from paceline.engine.vllm_devices import devices_of


@pytest.mark.parametrize(
    ("workers", "visible", "taken"),
    [
        (1, "0,1,2", ["0", "1", "2", "0"]),
        (2, "4,5,6,7", ["4,5", "6,7", "4,5", "6,7"]),
        (2, "0,1,2", ["0,1", "0,1", "0,1", "0,1"]),
        (4, "0,1", ["0,1", "0,1", "0,1", "0,1"]),
    ],
)
def test_engines_take_whole_sets_in_turn(workers: int, visible: str, taken: list[str]) -> None:
    assert [",".join(devices_of(place, workers, visible.split(","))) for place in range(4)] == taken
