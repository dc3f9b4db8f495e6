"""Retention: what is kept, what a slow reader sees, who may write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.checkpoint_engine.filesystem_opening import newest_life, open_storage
from paceline.core.errors import ConfigError, DeadlineExceeded, SyncError
from paceline.core.version import Version
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.roots import (
    V1,
    V2,
    V3,
    V4,
    V5,
    HookedClock,
    object_root,
    receiver,
    sender,
    weights,
)


@pytest.fixture(params=["local", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/weights" if request.param == "local" else object_root()


def kept(url: str) -> list[str]:
    return [str(version) for version in open_storage(url).versions()]


def test_the_newest_versions_stay(url: str) -> None:
    made = sender(url, keep_versions=3)
    for version in (V1, V2, V3, V4, V5):
        publish(made, weights(), version)
    assert kept(url) == ["1.3", "1.4", "1.5"]


def test_young_versions_stay_too(url: str) -> None:
    clock = HookedClock()
    made = sender(url, keep_seconds=10, clock=clock)
    for version in (V1, V2, V3, V4):
        publish(made, weights(), version)
        clock.at += 4
    assert kept(url) == ["1.2", "1.3", "1.4"]


def test_versions_of_an_earlier_life_age_from_the_start(url: str) -> None:
    made = sender(url)
    publish(made, weights(), V1)
    publish(made, weights(), V2)
    made.close()
    clock = HookedClock()
    again = sender(url, keep_seconds=10, clock=clock)
    publish(again, weights(), Version(2, 0).packed)
    assert kept(url) == ["1.1", "1.2", "2.0"]
    clock.at = 10
    publish(again, weights(), Version(2, 1).packed)
    assert kept(url) == ["2.0", "2.1"]


# ---- slow readers ---------------------------------------------------------------------------------------------------


def test_a_version_that_is_read_on_a_disk_is_not_removed(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    made = sender(url)
    first = publish(made, weights(1), V1)

    def publish_more() -> None:
        for version in (V2, V3, V4):
            publish(made, weights(2), version)

    staged = receiver(url, clock=HookedClock(publish_more, after=2)).stage(first)
    assert staged.tensors["norm"].tolist() == [1.0] * 7
    assert kept(url) == ["1.1", "1.3", "1.4"]
    publish(made, weights(2), V5)
    assert kept(url) == ["1.4", "1.5"]


def test_a_version_that_went_while_it_was_read_is_refused() -> None:
    url = object_root()
    made = sender(url)
    first = publish(made, weights(1), V1)

    def publish_more() -> None:
        for version in (V2, V3, V4):
            publish(made, weights(2), version)

    with pytest.raises(SyncError, match="is gone"):
        receiver(url, clock=HookedClock(publish_more, after=2)).stage(first)
    assert kept(url) == ["1.3", "1.4"]


def test_only_the_marker_went_while_it_was_read() -> None:
    """The bytes may be whole, but the version has ended."""
    url = object_root()
    first = publish(sender(url), [("w", torch.ones(5 << 20))], V1)
    filesystem = open_storage(url)._filesystem  # type: ignore[attr-defined] # noqa: SLF001
    path = f"{url.removeprefix('memory:/')}/1.1/COMPLETE"
    with pytest.raises(SyncError, match="is gone"):
        receiver(url, clock=HookedClock(lambda: filesystem.rm_file(path), after=3), verify="off").stage(first)


def test_a_reader_that_is_too_slow_names_the_place(url: str) -> None:
    first = publish(sender(url), [("w", torch.ones(5 << 20))], V1)
    clock = HookedClock()

    def pass_time() -> None:
        clock.at += 100

    clock = HookedClock(pass_time, after=2)
    with pytest.raises(DeadlineExceeded, match="without reaching its end") as caught:
        receiver(url, clock=clock).stage(first)
    assert caught.value.culprit == url


def test_staged_weights_need_no_file(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    made = sender(url)
    staged = receiver(url).stage(publish(made, weights(1), V1))
    for path in (tmp_path / "weights/1.1").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert staged.tensors["norm"].tolist() == [1.0] * 7


def test_released_memory_is_free_though_the_mapping_is_kept(url: str) -> None:
    staged = receiver(url).stage(publish(sender(url), weights(1), V1))
    mapping = staged.tensors
    staged.release()
    assert not mapping


# ---- one writer, lives ----------------------------------------------------------------------------------------------


def test_one_writer_per_disk_root(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    first = sender(url)
    with pytest.raises(ConfigError, match="another process publishes"):
        sender(url)
    first.close()
    sender(url).close()


def test_a_new_run_begins_a_new_life(url: str) -> None:
    assert newest_life(url) == 0
    made = sender(url)
    publish(made, weights(), Version(7, 3).packed)
    made.close()
    assert newest_life(url) == 7


# ---- memory of a receiver -------------------------------------------------------------------------------------------


def test_released_memory_is_used_again_once_no_tensor_refers_to_it(url: str) -> None:
    made, replica = sender(url), receiver(url)
    first = replica.stage(publish(made, weights(1.0), V1))
    second = replica.stage(publish(made, weights(2.0), V2))
    places = [staged.tensors["embed"].data_ptr() for staged in (first, second)]
    assert places[0] != places[1]
    kept_tensor = first.tensors["norm"]
    first.release()
    third = replica.stage(publish(made, weights(3.0), V3))
    assert third.tensors["embed"].data_ptr() not in places
    assert kept_tensor.tolist() == [1.0] * 7
    second.release()
    fourth = replica.stage(publish(made, weights(4.0), V4))
    assert fourth.tensors["embed"].data_ptr() == places[1]
    assert [third.tensors["norm"][0], fourth.tensors["norm"][0], kept_tensor[0]] == [3.0, 4.0, 1.0]


def test_at_most_one_buffer_waits_and_none_after_close(url: str) -> None:
    made, replica = sender(url), receiver(url)
    manifest = publish(made, weights(), V1)
    for staged in [replica.stage(manifest) for _ in range(3)]:
        staged.release()
    assert len(replica._buffers._spare) == 1  # noqa: SLF001
    last = replica.stage(manifest)
    replica.close()
    last.release()
    assert replica._buffers._spare == []  # noqa: SLF001
