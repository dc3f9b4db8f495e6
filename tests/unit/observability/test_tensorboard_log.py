"""TensorBoard scalars, read back from the file that was written."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from paceline.core.events import SampleDropped, ValidationFinished
from paceline.observability.tensorboard_log import TensorBoardLog
from tests.unit.observability.made_run import records, whole_run


def scalars_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for file in directory.iterdir():
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.tensor.float_val[0]))
    return dict(found)


def logged(directory: Path) -> dict[str, list[tuple[int, float]]]:
    log = TensorBoardLog(directory)
    log.start()
    run = whole_run()
    log.feed(run[:20])
    log.feed(run[20:])
    log.feed(records((30.0, "message_queue", SampleDropped(ids=["x", "y"], reason="shutdown"))))
    log.stop({})
    return scalars_of(directory)


def test_known_names_with_their_steps_and_values(tmp_path: Path) -> None:
    scalars = logged(tmp_path / "tensorboard")
    steps = list(range(1, 9))
    assert [step for step, _ in scalars["actor/grad_norm"]] == steps
    assert scalars["actor/pg_loss"][0] == (1, 0.25)
    assert [value for _, value in scalars["critic/rewards/mean"]] == pytest.approx([0.1 * step for step in steps])
    assert scalars["response_length/mean"][3] == (4, 4.0)
    assert [value for _, value in scalars["fully_async/count/current_param_version"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert scalars["fully_async/trainer/idle_ratio"][0] == (1, 0.25)
    assert scalars["fully_async/rollouter/idle_ratio"][-1] == pytest.approx((8, 0.2))
    assert dict(scalars["timing_s/param_sync"]) == pytest.approx(dict.fromkeys((0, 2, 4, 6, 8), 0.2))
    assert dict(scalars["val/accuracy"]) == pytest.approx({0: 0.41, 4: 0.61, 8: 0.81})
    assert scalars["fully_async/static/max_required_samples"][0][1] == 6
    assert scalars["fully_async/monitor/queue/mq_queue_size"][0][1] == 2
    assert scalars["paceline/version_lag/mean"][0][1] == 0.25
    assert [value for _, value in scalars["paceline/dropped/shutdown"]] == [1, 3]


def test_figures_of_a_validation_stand_under_their_own_names(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.start()
    figures = {"val-core/sums/acc/mean@2": 0.25, "val-aux/sums/length/mean@2": 3.0}
    finished = ValidationFinished(
        version=0, step=4, accuracy=0.25, problems=1, seconds=1.0, response_length_mean=3.0, metrics=figures
    )
    log.feed(records((1.0, "rollouter", finished)))
    log.stop({})
    scalars = scalars_of(tmp_path)
    assert {name: scalars[name] for name in figures} == {name: [(4, value)] for name, value in figures.items()}


def test_nothing_is_written_before_the_start_or_after_the_end(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "tensorboard")
    log.feed(whole_run())
    log.stop({})
    assert not (tmp_path / "tensorboard").exists()
