"""A follower sees whole versions only, in order, and waits with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.core.errors import DeadlineExceeded, SyncError
from paceline.core.version import Version
from paceline.runtime.system import InlineWork
from paceline.testing.publication import publish
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.checkpoint_engine.roots import V1, V2, V3, HookedClock, object_root, receiver, sender, weights

T = TypeVar("T")


@pytest.fixture(params=["local", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/weights" if request.param == "local" else object_root()


def test_nothing_is_there_before_the_first_version(url: str) -> None:
    follower = FilesystemFollower(url, clock=HookedClock(), work=InlineWork())
    assert follower.latest() is None
    made = sender(url)
    assert follower.latest() is None
    published = publish(made, weights(), V1)
    assert follower.latest() == published
    assert receiver(url).stage(published).manifest.version == V1


def test_a_later_life_is_newer(url: str) -> None:
    made = sender(url, keep_versions=9)
    publish(made, weights(), Version(1, 9).packed)
    newest = publish(made, weights(), Version(1, 10).packed)
    follower = FilesystemFollower(url, clock=HookedClock(), work=InlineWork())
    assert follower.latest() == newest
    newest = publish(made, weights(), Version(2, 0).packed)
    assert follower.latest() == newest


def test_another_path_to_the_same_root_is_followed(tmp_path: Path) -> None:
    published = publish(sender(f"{tmp_path}/weights"), weights(), V1)
    (tmp_path / "mounted").symlink_to(tmp_path / "weights")
    elsewhere = f"file://{tmp_path}/mounted"
    found = FilesystemFollower(elsewhere, clock=HookedClock(), work=InlineWork()).latest()
    assert found is not None
    assert (found.address, found.digest) == (elsewhere, published.digest)
    assert receiver(elsewhere).stage(found).digest == published.digest
    assert receiver(elsewhere).stage(published).digest == published.digest


def test_each_version_is_waited_for(url: str) -> None:
    made = sender(url)

    async def main(clock: VirtualClock) -> list[tuple[float, int]]:
        follower = FilesystemFollower(url, clock=clock, work=InlineWork(), poll_seconds=1)
        seen: list[tuple[float, int]] = []

        async def follow() -> None:
            version = -1
            while version < V3:
                version = (await follower.wait_newer(version, deadline_seconds=60)).version
                seen.append((clock.now(), version))

        following = asyncio.create_task(follow())
        for version, pause in ((V1, 10.5), (V2, 0.2), (V3, 0)):
            await clock.sleep(3.3)
            publish(made, weights(), version)
            await clock.sleep(pause)
        await following
        return seen

    assert run_virtual(main) == [(4.0, V1), (18.0, V2), (21.0, V3)]


def test_a_wait_ends_at_its_deadline_and_names_the_writer(url: str) -> None:
    publish(sender(url), weights(), V1)

    async def main(clock: VirtualClock) -> float:
        follower = FilesystemFollower(url, clock=clock, work=InlineWork(), poll_seconds=0.7)
        with pytest.raises(DeadlineExceeded, match=r"a version after 1\.1") as caught:
            await follower.wait_newer(V1, deadline_seconds=5)
        assert caught.value.culprit == f"the writer of {url}"
        return clock.now()

    assert run_virtual(main) == pytest.approx(5)


def test_a_storage_that_does_not_answer_is_left_at_the_deadline(url: str) -> None:
    class SilentWork:
        async def run(self, job: Callable[[], T]) -> T:
            await asyncio.Event().wait()
            return job()

    async def main(clock: VirtualClock) -> float:
        follower = FilesystemFollower(url, clock=clock, work=SilentWork())
        with pytest.raises(DeadlineExceeded, match="a first version"):
            await follower.wait_newer(-1, deadline_seconds=5)
        return clock.now()

    assert run_virtual(main) == pytest.approx(5)


def test_a_version_under_another_name_is_refused(tmp_path: Path) -> None:
    publish(sender(f"{tmp_path}/weights"), weights(), V1)
    (tmp_path / "weights/1.1").rename(tmp_path / "weights/1.2")
    with pytest.raises(SyncError, match=r"holds the manifest of version 1\.1"):
        FilesystemFollower(f"{tmp_path}/weights", clock=HookedClock(), work=InlineWork()).latest()
